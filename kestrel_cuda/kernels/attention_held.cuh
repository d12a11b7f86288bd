// What the warps of a split (attention_few.cuh) hold of its keys and values in registers, over either kind of cache. Int8
// rows stay codes until their mma: nothing waits for them before it must, and they take half the registers.

// A split is shared by 16 warps: two tiles of eight slots each for the scores; for the values, four warps a subtile and a
// part of the head's channels each (two of them where a part would be less than a tile of 8 columns).
constexpr int kFewThreads = 512;
constexpr int kFewWarps = kFewThreads / kWarp;
constexpr int kKeyTiles = kSplit / kFewWarps / 8;
constexpr int kWarpsPerSubtile = kFewWarps / kSubtiles;

// Those threads meet; a block may have others (token.cuh).
__device__ inline void sync_few() { asm volatile("bar.sync 1, %0;" ::"n"(kFewThreads) : "memory"); }

// Which of those threads this is, and what it has of a split.
struct FewThread {
    int index = this_thread();

    __device__ int warp() const { return index / kWarp; }
    __device__ int lane() const { return index % kWarp; }
    __device__ int quad() const { return lane() / 4; }
    __device__ int in_quad() const { return index % 4; }

    // The first slot of a tile of eight keys: few slots are spread over many warps.
    __device__ int tile_slot(int t) const { return (t * kFewWarps + warp()) * 8; }
    __device__ bool has_key(int slot) const { return slot / 8 % kFewWarps == warp(); }

    // Of the warps with values: with few slots others than those with keys.
    __device__ int value_warp() const { return (warp() + kFewWarps / 2) % kFewWarps; }
    __device__ int subtile() const { return value_warp() / kWarpsPerSubtile; }
};

template <int kHeadDim>
struct Parts {
    static constexpr int kNum = kHeadDim / 8 < kWarpsPerSubtile ? kHeadDim / 8 : kWarpsPerSubtile;
    static constexpr int kChannels = kHeadDim / kNum;
    static constexpr int kHalves = kChannels / 8;      // channels a lane reads of a value
};

// The keys of a warp's slots. Those from num_known on are loaded as zero: nobody asks for their scores, but registers that are
// not always written would be held from one split to the next.
template <typename Rows>
struct Keys;

template <int kHeadDim>
struct Keys<HalfRows<kHeadDim>> {
    using S = Shape<kHeadDim>;
    Run<S::kKeyHalves> of[kKeyTiles][S::kKeyRuns];

    __device__ void load(const HalfRows<kHeadDim>& k, int num_known) {
        const FewThread me;
        const int j = me.in_quad();
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
            const int slot = me.tile_slot(t) + me.quad();
#pragma unroll
            for (int run = 0; run < S::kKeyRuns; ++run) of[t][run].clear();
            if (slot >= num_known) continue;
#pragma unroll
            for (int run = 0; run < S::kKeyRuns; ++run)
                of[t][run].load(k.stored_sd + slot * kHeadDim + (run * 4 + j) * S::kKeyHalves);
        }
    }

    // Put in the key of one more slot, which is this warp's, from shared memory.
    __device__ void put(const HalfRow<kHeadDim>& key, int new_slot) {
        const FewThread me;
        const int j = me.in_quad();
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t)
            if (me.tile_slot(t) + me.quad() == new_slot)
#pragma unroll
                for (int run = 0; run < S::kKeyRuns; ++run) of[t][run].load(key.stored + (run * 4 + j) * S::kKeyHalves);
    }

    __device__ const Run<S::kKeyHalves>& run(int t, int run) const { return of[t][run]; }
};

// A run of 32 channels is a group.
template <int kHeadDim>
struct Keys<Int8Rows<kHeadDim>> {
    using S = Shape<kHeadDim>;
    static constexpr int kGroups = Int8Rows<kHeadDim>::kGroups;
    CodeRun<S::kKeyHalves> of[kKeyTiles][S::kKeyRuns];
    Run<kGroups> scales[kKeyTiles];

    __device__ void load(const Int8Rows<kHeadDim>& k, int num_known) {
        const FewThread me;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
            const int slot = me.tile_slot(t) + me.quad();
            scales[t].clear();
#pragma unroll
            for (int run = 0; run < S::kKeyRuns; ++run) of[t][run].clear();
            if (slot < num_known) load_slot(t, k.stored_sd + slot * kHeadDim, k.scales_sg + slot * kGroups);
        }
    }

    __device__ void put(const Int8Row<kHeadDim>& key, int new_slot) {
        const FewThread me;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t)
            if (me.tile_slot(t) + me.quad() == new_slot) load_slot(t, key.stored, key.scales);
    }

    // Two neighbouring entries at a time.
    struct Entries {
        const CodeRun<S::kKeyHalves>& codes;
        u32 scale_twice;

        __device__ u32 word(int i) const { return entry_pair(codes.words[i / 2], i % 2, scale_twice); }
    };

    __device__ Entries run(int t, int run) const { return {of[t][run], twice(scales[t].words[run / 2], run % 2)}; }

    __device__ void load_slot(int t, const i8* codes_d, const u16* scales_g) {
        const FewThread me;
        scales[t].load(scales_g);
#pragma unroll
        for (int run = 0; run < S::kKeyRuns; ++run) of[t][run].load(codes_d + (run * 4 + me.in_quad()) * S::kKeyHalves);
    }
};

// Which slots of a warp's subtile, and which part of the channels, a lane has of the values.
template <int kHeadDim>
struct ValuePlace {
    FewThread me;

    __device__ int first_slot() const { return me.subtile() * kSubtile + 2 * me.in_quad(); }

    // Entry `i` of a step, from the first slot on.
    __device__ static constexpr int slot(int step, int i) { return step * 16 + i % 2 + i / 2 * 8; }

    __device__ int channel() const {
        return me.value_warp() % Parts<kHeadDim>::kNum * Parts<kHeadDim>::kChannels + me.quad() * Parts<kHeadDim>::kHalves;
    }
};

// The values of a warp's subtile for its part of the channels. Slots from num_slots on read as zero.
template <typename Rows>
struct Values;

// Entries of neighbouring slots are put side by side, as an mma takes them, by `pair`, when they are there. `channel` is that
// of a column of a warp's tile t.
template <int kHeadDim>
struct Values<HalfRows<kHeadDim>> {
    using Place = ValuePlace<kHeadDim>;
    static constexpr int kHalves = Parts<kHeadDim>::kHalves;
    Run<kHalves> of[4][4];
    u32 pairs[4][2][kHalves];          // instead of `of`: of slots 2j and 2j + 1, and of the two eight further

    __device__ void load(const HalfRows<kHeadDim>& v, int num_slots) {
        const Place place;
        const int first = place.first_slot();
        const u16* from = v.stored_sd + first * kHeadDim + place.channel();
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (first + Place::slot(step, i) < num_slots) of[step][i].load(from + Place::slot(step, i) * kHeadDim);
                else of[step][i].clear();
            }
    }

    static __device__ constexpr int channel(int t, int column) { return column * kHalves + t; }

    __device__ void pair() {
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int t = 0; t < kHalves; ++t) {
                    const Run<kHalves>&even = of[step][2 * half], &odd = of[step][2 * half + 1];
                    pairs[step][half][t] = pair_halves(even.words[t / 2], odd.words[t / 2], t % 2);
                }
    }

    // Add the weighted values of a step's 16 slots, and the weights themselves to `sums`.
    __device__ void add(float (&out)[kHalves][4], float (&sums)[4], const u32 (&weights)[4], int step) const {
#pragma unroll
        for (int t = 0; t < kHalves; ++t) mma_m16n8k16(out[t], weights, pairs[step][0][t], pairs[step][1][t]);
        mma_m16n8k16(sums, weights, kHalfOnes, kHalfOnes);
    }
};

// Each lane holds the scales of two slots, 2 * lane and the one after it, and gets those it needs from the lanes that have
// them: a part of the channels lies in one group.
template <int kHeadDim>
struct Values<Int8Rows<kHeadDim>> {
    using Place = ValuePlace<kHeadDim>;
    static constexpr int kHalves = Parts<kHeadDim>::kHalves, kGroups = Int8Rows<kHeadDim>::kGroups;
    CodeRun<kHalves> of[4][4];
    u32 scales;

    __device__ void load(const Int8Rows<kHeadDim>& v, int num_slots) {
        const Place place;
        const int first = place.first_slot();
        const i8* from = v.stored_sd + first * kHeadDim + place.channel();
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (first + Place::slot(step, i) < num_slots) of[step][i].load(from + Place::slot(step, i) * kHeadDim);
                else of[step][i].clear();
            }
        const int scale_slot = place.me.subtile() * kSubtile + 2 * place.me.lane();
        const u16* at = v.scales_sg + scale_slot * kGroups + place.channel() / kCacheGroup;
        const u32 even = scale_slot < num_slots ? at[0] : 0u, odd = scale_slot + 1 < num_slots ? at[kGroups] : 0u;
        scales = even | odd << 16;
    }

    static __device__ constexpr int channel(int t, int column) { return column * kHalves + t; }

    // Codes stay codes until their mma.
    __device__ void pair() {}

    __device__ void add(float (&out)[kHalves][4], float (&sums)[4], const u32 (&weights)[4], int step) const {
        const FewThread me;
        u32 pairs[2][kHalves];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Of a pair of slots, the channels side by side: what an mma takes as a word.
            const u32 scale_pair = __shfl_sync(0xffffffffu, scales, step * 8 + half * 4 + me.in_quad());
            const u32 even = biased_codes(of[step][2 * half].words[0]), odd = biased_codes(of[step][2 * half + 1].words[0]);
            const u32 lower = __byte_perm(even, odd, 0x5140), upper = __byte_perm(even, odd, 0x7362);
#pragma unroll
            for (int t = 0; t < kHalves; ++t)
                pairs[half][t] = scaled(halves_of_codes(t < 2 ? lower : upper, t % 2 ? 0x4342 : 0x4140), scale_pair);
        }
#pragma unroll
        for (int t = 0; t < kHalves; ++t) mma_m16n8k16(out[t], weights, pairs[0][t], pairs[1][t]);
        mma_m16n8k16(sums, weights, kHalfOnes, kHalfOnes);
    }
};

// A split's keys and values of the cache in registers: keys ahead of the queries, values where keys were. What
// attention_few.cuh takes as a split; token_boxes.cuh has another.
template <int kHeadDim, typename Rows>
struct HeldSplit {
    using ValuesOf = Values<Rows>;
    const Rows k, v;
    Keys<Rows> keys;

    // By every thread of the block.
    __device__ HeldSplit(const Rows& k_sd, const Rows& v_sd, int num_known) : k(k_sd), v(v_sd) {
        keys.load(k, num_known);
        v.prefetch(num_known);
    }

    // A new slot's value, by the warp that has it written to the cache, whence it is read again.
    __device__ void keep_value(int, float) {}

    // By all, behind a barrier: a new slot's key is in shared memory.
    __device__ void take_new(const typename Rows::New& key, int slot) {
        const FewThread me;
        if (me.has_key(slot)) keys.put(key, slot);
    }

    // Behind the scores.
    __device__ void load(ValuesOf& values, int num_slots) const { values.load(v, num_slots); }
};
