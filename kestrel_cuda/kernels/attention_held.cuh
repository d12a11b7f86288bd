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

// The first slot of a warp's tile of eight keys: few slots are spread over many warps.
__device__ inline int tile_slot(int t) { return (t * kFewWarps + (int)threadIdx.x / kWarp) * 8; }

template <int kHeadDim>
struct Parts {
    static constexpr int kNum = kHeadDim / 8 < kWarpsPerSubtile ? kHeadDim / 8 : kWarpsPerSubtile;
    static constexpr int kChannels = kHeadDim / kNum;
    static constexpr int kHalves = kChannels / 8;      // channels a lane reads of a value
};

// The keys of a warp's slots. Slots from num_known on read as zero.
template <typename Rows>
struct Keys;

template <int kHeadDim>
struct Keys<HalfRows<kHeadDim>> {
    using S = Shape<kHeadDim>;
    Run<S::kKeyHalves> of[kKeyTiles][S::kKeyRuns];

    __device__ void load(const HalfRows<kHeadDim>& k, int num_known) {
        const int quad = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
            const i64 slot = tile_slot(t) + quad;
#pragma unroll
            for (int run = 0; run < S::kKeyRuns; ++run) {
                if (slot < num_known) of[t][run].load(k.stored_sd + slot * kHeadDim + (run * 4 + j) * S::kKeyHalves);
                else of[t][run].clear();
            }
        }
    }

    // Put in the key of one more slot, from shared memory.
    __device__ void put(const HalfRow<kHeadDim>& key, int new_slot) {
        const int quad = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t)
            if (tile_slot(t) + quad == new_slot)
#pragma unroll
                for (int run = 0; run < S::kKeyRuns; ++run) of[t][run].load(key.stored + (run * 4 + j) * S::kKeyHalves);
    }

    // Two neighbouring entries of a run.
    __device__ u32 word(int t, int run, int i) const { return of[t][run].words[i]; }
};

// A run of 32 channels is a group.
template <int kHeadDim>
struct Keys<Int8Rows<kHeadDim>> {
    using S = Shape<kHeadDim>;
    static constexpr int kGroups = Int8Rows<kHeadDim>::kGroups;
    CodeRun<S::kKeyHalves> of[kKeyTiles][S::kKeyRuns];
    Run<kGroups> scales[kKeyTiles];

    __device__ void load(const Int8Rows<kHeadDim>& k, int num_known) {
        const int quad = threadIdx.x % kWarp / 4;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
            const i64 slot = tile_slot(t) + quad;
            if (slot < num_known) {
                load_slot(t, k.stored_sd + slot * kHeadDim, k.scales_sg + slot * kGroups);
            } else {
                scales[t].clear();
#pragma unroll
                for (int run = 0; run < S::kKeyRuns; ++run) of[t][run].clear();
            }
        }
    }

    __device__ void put(const Int8Row<kHeadDim>& key, int new_slot) {
        const int quad = threadIdx.x % kWarp / 4;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t)
            if (tile_slot(t) + quad == new_slot) load_slot(t, key.stored, key.scales);
    }

    __device__ u32 word(int t, int run, int i) const {
        return entry_pair(of[t][run].words[i / 2], i % 2, twice(scales[t].words[run / 2], run % 2));
    }

    __device__ void load_slot(int t, const i8* codes_d, const u16* scales_g) {
        scales[t].load(scales_g);
#pragma unroll
        for (int run = 0; run < S::kKeyRuns; ++run) of[t][run].load(codes_d + (run * 4 + threadIdx.x % 4) * S::kKeyHalves);
    }
};

// Which slots of a warp's subtile, and which part of the channels, a lane has of the values.
template <int kHeadDim>
struct ValuePlace {
    __device__ static int slot(int step, int i) {
        return threadIdx.x / kWarp / kWarpsPerSubtile * kSubtile + step * 16 + 2 * (threadIdx.x % 4) + i % 2 + i / 2 * 8;
    }

    __device__ static int channel() {
        return threadIdx.x / kWarp % Parts<kHeadDim>::kNum * Parts<kHeadDim>::kChannels +
               threadIdx.x % kWarp / 4 * Parts<kHeadDim>::kHalves;
    }
};

// The values of a warp's subtile for its part of the channels; likewise.
template <typename Rows>
struct Values;

template <int kHeadDim>
struct Values<HalfRows<kHeadDim>> {
    using Place = ValuePlace<kHeadDim>;
    static constexpr int kHalves = Parts<kHeadDim>::kHalves;
    Run<kHalves> of[4][4];

    __device__ void load(const HalfRows<kHeadDim>& v, int num_known) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int s = Place::slot(step, i);
                if (s < num_known) of[step][i].load(v.stored_sd + (i64)s * kHeadDim + Place::channel());
                else of[step][i].clear();
            }
    }

    __device__ void put(const HalfRow<kHeadDim>& value, int new_slot) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (Place::slot(step, i) == new_slot) of[step][i].load(value.stored + Place::channel());
    }

    __device__ void add(float (&out)[kHalves][4], float (&sums)[4], const u32 (&weights)[4], int step) const {
        add_values(out, sums, weights, of[step]);
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

    __device__ static int group() { return Place::channel() / kCacheGroup; }

    __device__ static int scale_slot() {
        return threadIdx.x / kWarp / kWarpsPerSubtile * kSubtile + 2 * (threadIdx.x % kWarp);
    }

    __device__ void load(const Int8Rows<kHeadDim>& v, int num_known) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int s = Place::slot(step, i);
                if (s < num_known) of[step][i].load(v.stored_sd + (i64)s * kHeadDim + Place::channel());
                else of[step][i].clear();
            }
        const u16* at = v.scales_sg + (i64)scale_slot() * kGroups + group();
        const u32 even = scale_slot() < num_known ? at[0] : 0u, odd = scale_slot() + 1 < num_known ? at[kGroups] : 0u;
        scales = even | odd << 16;
    }

    __device__ void put(const Int8Row<kHeadDim>& value, int new_slot) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (Place::slot(step, i) == new_slot) of[step][i].load(value.stored + Place::channel());
        // Slots after it are not there, so that nothing is lost with the upper half.
        if (scale_slot() == new_slot) scales = value.scales[group()];
        if (scale_slot() + 1 == new_slot) scales = (scales & 0xffffu) | (u32)value.scales[group()] << 16;
    }

    __device__ void add(float (&out)[kHalves][4], float (&sums)[4], const u32 (&weights)[4], int step) const {
        u32 pairs[2][kHalves];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Of a pair of slots, the channels side by side: what an mma takes as a word.
            const u32 scale_pair = __shfl_sync(0xffffffffu, scales, step * 8 + half * 4 + threadIdx.x % 4);
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
