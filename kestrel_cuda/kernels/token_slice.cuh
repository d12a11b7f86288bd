// A context of one split, which several blocks of a kv head attend to: each makes all of its weights and sums up the
// values of 32 channels, so that none has many bytes to read, and what it reads is in registers before the row is
// there. Knows no stage.
//
// Slots, or channels of values, are the rows of an mma here and the queries its columns: eight of them are fewer sums
// than sixteen rows, and a row of ones beside the values adds up the weights. They are the sums of attention_few.cuh to
// the bit: both feed an mma the same products, 16 at a time, in the same order.

constexpr int kSliceQueries = 8;       // columns of an mma
constexpr int kEights = kSubtile / 8;  // of slots
constexpr int kSliceRow = kGroup * 2;  // bytes

// What a block's warps hand to one another. Columns past the last query hold anything.
struct __align__(16) SliceWeights {
    u16 weights[kSliceQueries][kSplit + 8];        // so that queries' reads meet no bank twice, here and in maxima
    float maxima[kSliceQueries][kFewWarps + 4];
    float sums[kSliceQueries][kSubtiles];
    float parts[kSubtiles][kSliceQueries][kGroup];
};

template <int kHeadDim>
struct __align__(16) SliceQueries {
    u16 queries[kHeadDim / kGroup][kSliceQueries][kGroup];
    HalfRow<kHeadDim> new_key;
    u16 new_value[kGroup];

    __device__ void put(int query, int d, float x) { queries[d / kGroup][query][d % kGroup] = float_to_half(x); }
};

// Boxes of 64 slots: panels of their keys and behind them rows of a slice of their values, swizzled by fours. There are
// as many as a split has subtiles and warps meet before the next layer's are taken, so that all of one layer's have
// landed.
template <int kHeadDim>
struct SliceRing : BoxRing<Panels<kHeadDim>::kBytes + kSubtile * kSliceRow, kKeyTakers + kWarpsPerSubtile> {
    using Base = BoxRing<Panels<kHeadDim>::kBytes + kSubtile * kSliceRow, kKeyTakers + kWarpsPerSubtile>;
    static constexpr int kNumSlices = kHeadDim / kGroup;

    // Where a run of 8 channels of a slot's values lies.
    __device__ static u32 value(int slot, int eight) {
        return Panels<kHeadDim>::kBytes + slot * kSliceRow + (eight ^ slot / 2 % 4) * 16;
    }

    // All that this block attends to, layer by layer, by one thread.
    __device__ void copy_all(const u8* maps, int num_layers, int num_kv_heads, int last, int first_unit) const {
        KvPlace next = Base::nothing_copied();
#pragma unroll 1
        for (; num_layers > 0; --num_layers, maps += kKvMaps * 128)
#pragma unroll 1
            for (int unit = first_unit; unit < kNumSlices * num_kv_heads; unit += gridDim.x)
#pragma unroll 1
                for (int slot = 0; slot <= last; slot += kSubtile) {
                    Base::begin_box(next);
                    const u32 box = Base::box(next), barrier = Base::full(next);
                    auto copy = [&](u32 at, KvMap map, int channel) {
                        copy_rows(box + at, maps + map * 128, channel, slot, unit % num_kv_heads, barrier);
                    };
#pragma unroll
                    for (int panel = 0; panel < Panels<kHeadDim>::kNum; ++panel)
                        copy(panel * kPanelBytes, kKeyPanels, panel * kPanelChannels);
                    copy(Panels<kHeadDim>::kBytes, kValueSlices, unit / num_kv_heads * kGroup);
                    next = Base::step(next, 1);
                }
    }
};

// A warp's part of the cache in registers.
template <int kHeadDim>
struct SlicePart {
    using S = Shape<kHeadDim>;
    using Ring = SliceRing<kHeadDim>;
    Run<S::kKeyHalves> keys[kKeyTiles][S::kKeyRuns];
    u32 values[kEights];               // of one channel, pairs of neighbouring slots of each eight of the subtile

    // Entries past those that are known are zero where a sum would meet them.
    __device__ void load(const Ring& ring, KvPlace first, int num_known) {
        const FewThread me;
        const int num_boxes = num_known / kSubtile + 1;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
            for (int run = 0; run < S::kKeyRuns; ++run) keys[t][run].clear();
            const int box = me.tile_slot(t) / kSubtile;
            if (box >= num_boxes) continue;
            const KvPlace place = ring.step(first, box);
            if (me.tile_slot(t) < num_known) {
                ring.await(place);
                Panels<kHeadDim>::load_key(keys[t], ring.box(place), me.tile_slot(t) % kSubtile + me.quad());
            }
            ring.give_back(place, 1);
        }
#pragma unroll
        for (int i = 0; i < kEights; ++i) values[i] = 0;
        if (me.subtile() >= num_boxes) return;
        const KvPlace place = ring.step(first, me.subtile());
        ring.await(place);
        const u32 from = ring.box(place) + Ring::value(me.lane(), part());
#pragma unroll
        for (int i = 0; i < kEights; i += 4)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(values[i]), "=r"(values[i + 1]), "=r"(values[i + 2]), "=r"(values[i + 3])
                         : "r"(from + i * 8 * kSliceRow)
                         : "memory");
        ring.give_back(place, 1);
        if (me.subtile() < num_known / kSubtile) return;
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
            const int left = num_known % kSubtile - i * 8 - 2 * me.in_quad();
            values[i] = left >= 2 ? values[i] : left == 1 ? values[i] & 0xffff : 0;
        }
    }

    // The new slot's, behind a barrier.
    __device__ void take_new(const SliceQueries<kHeadDim>& queries, int new_slot) {
        const FewThread me;
        if (me.has_key(new_slot)) {
#pragma unroll
            for (int t = 0; t < kKeyTiles; ++t)
                if (me.tile_slot(t) + me.quad() == new_slot)
#pragma unroll
                    for (int run = 0; run < S::kKeyRuns; ++run)
                        keys[t][run].load(queries.new_key.stored + (run * 4 + me.in_quad()) * S::kKeyHalves);
        }
        if (me.subtile() == new_slot / kSubtile && new_slot % 8 / 2 == me.in_quad()) {
            const u32 value = (u32)queries.new_value[part() * 8 + me.quad()] << new_slot % 2 * 16;
#pragma unroll
            for (int i = 0; i < kEights; ++i) values[i] |= new_slot % kSubtile / 8 == i ? value : 0u;
        }
    }

    // Dots of this warp's slots, `quad` of either tile, with queries 2j and 2j + 1: (tile, query) in turn.
    __device__ void score(float (&dots)[4], const SliceQueries<kHeadDim>& queries) const {
        const FewThread me;
        dots[0] = dots[1] = dots[2] = dots[3] = 0.0f;
#pragma unroll
        for (int run = 0; run < S::kKeyRuns; ++run) {
            const uint4 v = *(const uint4*)&queries.queries[run][me.quad()][me.in_quad() * S::kKeyHalves];
            const u32 query[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const u32 slots[4] = {keys[0][run].words[i], keys[1][run].words[i], keys[0][run].words[i + 1],
                                      keys[1][run].words[i + 1]};
                mma_m16n8k16(dots, slots, query[i], query[i + 1]);
            }
        }
    }

    // Weighted values of this warp's channels, `quad`, for queries 2j and 2j + 1, and the sums of their weights.
    __device__ void add(float (&sums)[4], const SliceWeights& shared) const {
        const FewThread me;
        const u16* weights = &shared.weights[me.quad()][me.subtile() * kSubtile + 2 * me.in_quad()];
        sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll
        for (int i = 0; i < kEights; i += 2) {
            const u32 rows[4] = {values[i], kHalfOnes, values[i + 1], kHalfOnes};
            mma_m16n8k16(sums, rows, *(const u32*)(weights + i * 8), *(const u32*)(weights + i * 8 + 8));
        }
    }

    __device__ static int part() { return FewThread{}.value_warp() % kWarpsPerSubtile; }
};

// A slice of one kv head for one query: q/k norm and rotation, the write to the cache, attention and the activation
// codes. `queries` and `shared` lie in shared memory: the first is written before any barrier, the other behind one.
template <int kHeadDim, typename Words>
__device__ inline void attend_slice(SliceQueries<kHeadDim>& queries, SliceWeights& shared,
                                    const SliceRing<kHeadDim>& ring, KvPlace& place, const RowAttention<HalfCache>& a,
                                    const Words& words, int kv_head, int slice) {
    const FewThread me;
    const int warp = me.warp(), lane = me.lane(), quad = me.quad(), j = me.in_quad();
    const int num_known = a.last, num_slots = num_known + 1, num_queries = a.queries_per_kv;
    const float scale = a.scale, eps = a.eps;
    // The new key, the new value and the queries are a warp's each, the last warps' first: with few slots those have
    // neither keys nor values.
    constexpr int kNewKey = 0, kNewValue = 1, kFirstQuery = 2;
    static_assert(kFirstQuery + kSliceQueries <= kFewWarps, "a warp each");
    const int role = kFewWarps - 1 - warp;
    const bool is_turned = role < kFirstQuery + num_queries && role != kNewValue;
    Rotation<kHeadDim> rotation;
    const i64 angles_at = (i64)num_known * (kHeadDim / 2);
    if (is_turned)
        rotation.fetch(role == kNewKey ? a.k_norm_d : a.q_norm_d, a.cos_sd + angles_at, a.sin_sd + angles_at);
    const i64 new_at = ((i64)kv_head * a.ctx + num_known) * kHeadDim;
    if (is_turned) {
        float x[Rotation<kHeadDim>::kChannels];
        words.load(x, role == kNewKey ? a.k_column + kv_head * kHeadDim
                                    : (kv_head * num_queries + role - kFirstQuery) * kHeadDim, kHeadDim);
        rotation.turn(x, eps, [&](int d, float y) {
            if (role == kNewKey) queries.new_key.put(d, y);
            else queries.put(role - kFirstQuery, d, y);
        });
    } else if (role == kNewValue) {
        float x[1];
        words.load(x, a.v_column + kv_head * kHeadDim + slice * kGroup, kGroup);
        const u16 value = saturated_half(x[0]);
        queries.new_value[lane] = value;
        a.v.stored[new_at + slice * kGroup + lane] = value;
    }
    // A warp with a row does that first: all but a few have this done before the rows are there.
    int2 first;
    load_shared(first, shared_address(&place));
    SlicePart<kHeadDim> part;
    part.load(ring, {first.x, first.y}, num_known);
    sync_few();
    if (lane == 0) place = ring.step({first.x, first.y}, num_known / kSubtile + 1);
    part.take_new(queries, num_known);

    float weights[4];
    part.score(weights, queries);
    float largest[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        weights[c] = me.tile_slot(c / 2) + quad < num_slots ? mul_rn(weights[c], scale) : minus_infinity();
        largest[c % 2] = fmaxf(largest[c % 2], weights[c]);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2)
            largest[c] = fmaxf(largest[c], __shfl_xor_sync(0xffffffffu, largest[c], step));
        if (quad == 0) shared.maxima[2 * j + c][warp] = largest[c];
    }
    sync_few();
    if (2 * j < num_queries) {
        const float top[2] = {largest_of(shared.maxima[2 * j]), largest_of(shared.maxima[2 * j + 1])};
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
            const int slot = me.tile_slot(t);
            // Nobody reads weights of a subtile without slots.
            if (slot / kSubtile * kSubtile >= num_slots) break;
            // Past the last slot the power of minus infinity: zero.
            const u32 pair = pack_halves(exp2_fast(sub_rn(weights[2 * t], top[0])),
                                         exp2_fast(sub_rn(weights[2 * t + 1], top[1])));
            shared.weights[2 * j][slot + quad] = (u16)pair, shared.weights[2 * j + 1][slot + quad] = (u16)(pair >> 16);
        }
    }
    sync_few();
    if (me.subtile() * kSubtile < num_slots) {
        float sums[4];
        part.add(sums, shared);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            if (2 * j + c >= num_queries) break;
            shared.parts[me.subtile()][2 * j + c][part.part() * 8 + quad] = sums[c];
            if (part.part() == 0 && quad == 0) shared.sums[2 * j + c][me.subtile()] = sums[2 + c];
        }
    }
    const FlaggedCodes codes = words.codes();
    sync_few();
    if (warp < num_queries) {
        // What a merge with nothing gives.
        const float sum = add_subtiles(shared.sums[warp], 1, num_slots);
        const float out = add_subtiles(&shared.parts[0][warp][lane], kSliceQueries * kGroup, num_slots);
        float code_scale;
        const int code = quantize_in_group(div_rn(out, sum), code_scale);
        codes.put((kv_head * num_queries + warp) * (kHeadDim / kGroup) + slice, code, code_scale);
    }
    // Once, of those that share the split.
    if (role == kNewKey && slice == 0) a.k.put(new_at, queries.new_key);
}
