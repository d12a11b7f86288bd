// Causal grouped-query attention over float16 or int8 entries for few queries, a split at a time: what attention_few*.cu
// and token*.cu share. attention_half.cuh has the sums and why a query's result does not depend on which kernel made it.

// RMSNorm and rotation of one head by one warp, as rope.cu. The weight and the angles do not depend on the row, so they
// are fetched before it is there. `put(d, y)` gets each channel.
template <int kHeadDim>
struct Rotation {
    static constexpr int kChannels = (kHeadDim + kWarp - 1) / kWarp;
    static constexpr int kHalf = kHeadDim / 2;
    static constexpr int kAngles = (kChannels + 1) / 2;     // channels i and i + kAngles are a pair
    float weight[kChannels], cosine[kAngles], sine[kAngles];

    __device__ void fetch(const float* weight_d, const float* cos_d, const float* sin_d) {
        const int lane = this_thread() % kWarp;
#pragma unroll
        for (int i = 0; i < kChannels; ++i) weight[i] = lane + i * kWarp < kHeadDim ? weight_d[lane + i * kWarp] : 0.0f;
#pragma unroll
        for (int i = 0; i < kAngles; ++i) {
            const int pair = (lane + i * kWarp) % kHalf;
            cosine[i] = cos_d[pair], sine[i] = sin_d[pair];
        }
    }

    template <typename Put>
    __device__ void turn(const float (&x)[kChannels], float eps, Put put) const {
        const int lane = this_thread() % kWarp;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kChannels; ++i)
            if (lane + i * kWarp < kHeadDim) sum = fma_rn(x[i], x[i], sum);
        static_assert((kHeadDim & (kHeadDim - 1)) == 0, "the mean is a product by a power of two: a quotient's bits");
        const float rstd = __frsqrt_rn(add_rn(mul_rn(warp_sum(sum), 1.0f / kHeadDim), eps));
        float normed[kChannels];
#pragma unroll
        for (int i = 0; i < kChannels; ++i) normed[i] = mul_rn(weight[i], mul_rn(x[i], rstd));
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const int d = lane + i * kWarp;
            float other;
            if constexpr (kChannels > 1) other = i < kAngles ? -normed[i + kAngles] : normed[i - kAngles];
            else other = __shfl_xor_sync(0xffffffffu, d < kHalf ? normed[0] : -normed[0], kHalf);
            if (d < kHeadDim) put(d, add_rn(mul_rn(normed[i], cosine[i % kAngles]), mul_rn(other, sine[i % kAngles])));
        }
        __syncwarp();
    }
};

// Splits that are fetched before the first of them is merged: the merges are a chain, the fetches need not be.
constexpr int kMergedAtOnce = 8;

// What a block of few rows is given in shared memory. Rows past the last query hold anything: a row of an mma does not depend
// on the others, and nobody reads theirs.
template <int kHeadDim, typename NewRow>
struct __align__(16) FewQueries {
    u32 fragments[Shape<kHeadDim>::kSteps * kWarp * 4];
    NewRow new_key;

    __device__ void put(int row, int d, float x) { ((u16*)fragments)[Shape<kHeadDim>::query_half(row, d)] = float_to_half(x); }
};

// And what it makes of them.
struct __align__(16) FewWeights {
    u32 fragments[kSplit / 16 * kWarp * 4];
    float maxima[kMmaRows][kFewWarps + 4];     // so that rows' reads of 16 bytes meet no bank twice
    float row_max[kMmaRows];
    float sums[kMmaRows][kSubtiles];
};

// Dots of the query rows with a warp's keys, a chain of mma over the channels for each tile that has slots.
template <int kHeadDim, typename Split>
__device__ inline void score_tiles(float (&dots)[kKeyTiles][4], const u32* queries, const Split& split, int num_slots) {
    using S = Shape<kHeadDim>;
    const FewThread me;
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
        dots[t][0] = dots[t][1] = dots[t][2] = dots[t][3] = 0.0f;
        if (me.tile_slot(t) >= num_slots) continue;
#pragma unroll
        for (int run = 0; run < S::kKeyRuns; ++run) {
            const auto halves = split.keys.run(t, run);
#pragma unroll
            for (int i = 0; i < S::kKeyHalves / 4; ++i) {
                const Fragment q = load_fragment(queries, run * (S::kKeyHalves / 4) + i);
                mma_m16n8k16(dots[t], q.words, halves.word(2 * i), halves.word(2 * i + 1));
            }
        }
    }
}

// The largest score of a row, over all warps.
__device__ inline float largest_of(const float (&maxima)[kFewWarps + 4]) {
    float largest = minus_infinity();
#pragma unroll
    for (int w = 0; w < kFewWarps; w += 4) {
        const float4 four = *(const float4*)&maxima[w];
        largest = fmaxf(largest, fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
    }
    return largest;
}

// One split for up to 16 query rows in shared memory: `out` [subtile][row][d] gets the weighted values of each subtile
// that has slots, shared.sums the sums of weights, row_max the maximum of each row. Values are loaded when there are
// scores, where keys were in registers. Every thread of the block takes part.
template <int kHeadDim, typename Split>
__device__ inline void split_of_few_rows(FewWeights& shared, const u32* queries, const Split& split, int num_rows,
                                         int num_slots, float scale, float* out) {
    const FewThread me;
    const int quad = me.quad(), j = me.in_quad();
    // Rows `quad` and, where there are so many, `quad` + 8.
    const int num_halves = num_rows > 8 ? 2 : 1;
    float scores[kKeyTiles][4];
    score_tiles<kHeadDim>(scores, queries, split, num_slots);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half >= num_halves) break;
        float largest = minus_infinity();
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& score = scores[t][2 * half + c];
                score = me.tile_slot(t) + 2 * j + c < num_slots ? mul_rn(score, scale) : minus_infinity();
                largest = fmaxf(largest, score);
            }
        largest = quad_max(largest);
        if (j == 0) shared.maxima[quad + 8 * half][me.warp()] = largest;
    }
    // From all warps' maxima to the weights of this warp's slots.
    auto weigh = [&] {
        sync_few();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half >= num_halves) break;
            const float row_max = largest_of(shared.maxima[quad + 8 * half]);
            if (me.warp() == kFewWarps - 1 && j == 0) shared.row_max[quad + 8 * half] = row_max;
#pragma unroll
            for (int t = 0; t < kKeyTiles; ++t) {
                const int slot = me.tile_slot(t);
                // Nobody reads weights of a subtile without slots.
                if (slot / kSubtile * kSubtile >= num_slots) break;
                // Past the last slot the power of minus infinity: zero.
                const float even = exp2_fast(sub_rn(scores[t][2 * half], row_max));
                const float odd = exp2_fast(sub_rn(scores[t][2 * half + 1], row_max));
                shared.fragments[fragment_word(slot / 16, quad + 8 * half, slot % 16 / 2 + j)] = pack_halves(even, odd);
            }
        }
    };
    const int subtile = me.subtile(), part = me.value_warp() % kWarpsPerSubtile;
    if (subtile * kSubtile < num_slots && part < Parts<kHeadDim>::kNum) {
        constexpr int kHalves = Parts<kHeadDim>::kHalves;
        typename Split::ValuesOf values;
        split.load(values, num_slots);
        weigh();
        values.pair();
        sync_few();
        float acc[kHalves][4], sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < kHalves; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0f;
#pragma unroll
        for (int step = 0; step < 4; ++step)
            values.add(acc, sums, load_fragment(shared.fragments, subtile * (kSubtile / 16) + step).words, step);
        float* to = out + (subtile * num_rows + quad) * kHeadDim + part * Parts<kHeadDim>::kChannels;
#pragma unroll
        for (int half = 0; half < 2; ++half, to += 8 * kHeadDim) {
            if (quad + 8 * half >= num_rows) break;
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int t = 0; t < kHalves; ++t) to[values.channel(t, 2 * j + c)] = acc[t][2 * half + c];
            if (part == 0 && j == 0) shared.sums[quad + 8 * half][subtile] = sums[2 * half];
        }
    } else {
        weigh();
        sync_few();
    }
    sync_few();
}

// In ascending order, those that have slots. What a subtile without any would add is zero.
__device__ inline float add_subtiles(const float* parts, int stride, int num_slots) {
    float total = 0.0f;
#pragma unroll
    for (int t = 0; t < kSubtiles; ++t)
        if (t * kSubtile < num_slots) total = add_rn(total, parts[t * stride]);
    return total;
}

// A row's joint projection in global memory, read past the first-level cache: others have just written it.
struct PlainRow {
    const float* qkv_n;

    template <int kChannels>
    __device__ void load(float (&x)[kChannels], int column, int count) const {
        const int lane = this_thread() % kWarp;
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const int at = lane + i * kWarp;
            x[i] = at < count ? __ldcg(qkv_n + column + at) : 0.0f;
        }
    }
};

// Where activation codes go: a warp puts a group, one code a lane.
struct PlainCodes {
    i8* codes;
    float* scales;

    __device__ void put(int group, int code, float scale) const {
        const int lane = this_thread() % kWarp;
        codes[group * kGroup + lane] = (i8)code;
        if (lane == 0) scales[group] = scale;
    }
};

// One layer's norms and cache; queries_per_kv * d divides by 32.
template <typename Cache>
struct RowAttention {
    const float *q_norm_d, *k_norm_d, *cos_sd, *sin_sd;
    Cache k, v;
    int last, k_column, v_column, queries_per_kv, ctx;
    float scale, eps;

    __device__ int used_splits() const { return last / kSplit + 1; }
    // Slots of a split, the new one among them.
    __device__ int num_slots(int split) const { return min(kSplit, last + 1 - split * kSplit); }
    __device__ bool has_new(int split) const { return split == used_splits() - 1; }
    __device__ int num_known(int split) const { return num_slots(split) - has_new(split); }
    // The channel of a cache at which a split of a kv head begins.
    template <int kHeadDim>
    __device__ i64 at(int split, int kv_head) const {
        return ((i64)kv_head * ctx + split * kSplit) * kHeadDim;
    }
};

// A split's results for one head and channel, into a running merge.
struct RunningMerge {
    float max = minus_infinity(), sum = 0.0f, out = 0.0f;

    __device__ void add(float split_max, float split_sum, float split_out) {
        float keep, take, merged_max;
        merge_weights(max, split_max, keep, take, merged_max);
        sum = merge(sum, keep, split_sum, take);
        out = merge(out, keep, split_out, take);
        max = merged_max;
    }
};

// What the splits of a head hand on to the one that merges them, in arrays [heads][num_splits]([d]): whichever ends last.
// arrived_h [kv_heads] counts them and is zero between layers.
template <int kHeadDim>
struct PlainSplits {
    static constexpr bool kMergesHere = true;
    float *max_hs, *sum_hs, *out_hsd;
    int* arrived_h;
    int num_splits;

    struct Part {
        float max, sum, out;
    };

    __device__ i64 at(int head, int split) const { return (i64)head * num_splits + split; }
    __device__ void put(int head, int split, int d, float out) const { out_hsd[at(head, split) * kHeadDim + d] = out; }
    __device__ void put_weights(int head, int split, float max, float sum) const {
        max_hs[at(head, split)] = max, sum_hs[at(head, split)] = sum;
    }

    // Whether this block merges. By all threads, when everything is put.
    __device__ bool merges(int kv_head, int split, int used_splits) const {
        __shared__ int is_last;
        // One thread's fences order what the barriers order before and after them.
        sync_few();
        if (this_thread() == 0) {
            __threadfence();
            is_last = atomicAdd(&arrived_h[kv_head], 1) == used_splits - 1;
            if (is_last) arrived_h[kv_head] = 0;
            __threadfence();
        }
        sync_few();
        return is_last;
    }

    __device__ void fetch(Part& part, int head, int split, int d) const {
        const i64 from = at(head, split);
        part = {__ldcg(max_hs + from), __ldcg(sum_hs + from), __ldcg(out_hsd + from * kHeadDim + d)};
    }

    // A channel of a head, every split's in ascending order.
    __device__ RunningMerge merged(int head, int d, int used_splits) const {
        RunningMerge merged;
        for (int first = 0; first < used_splits; first += kMergedAtOnce) {
            Part part[kMergedAtOnce];
#pragma unroll
            for (int s = 0; s < kMergedAtOnce; ++s) fetch(part[s], head, min(first + s, used_splits - 1), d);
#pragma unroll
            for (int s = 0; s < kMergedAtOnce; ++s)
                if (first + s < used_splits) merged.add(part[s].max, part[s].sum, part[s].out);
        }
        return merged;
    }
};

// One split of one kv head for one query: q/k norm and rotation, the write to the cache, attention, and, where there is one
// split or `splits` has them merged here by one of their blocks, the activation codes. `held` are the split's keys and
// values; `wait` is called before the row is read. `parts`: 4 * queries_per_kv * d floats of shared memory. `queries` and
// what `held` keeps are written before any barrier, the rest behind one.
template <int kHeadDim, typename NewRow, typename Split, typename Cache, typename Row, typename Splits, typename Codes,
          typename Wait>
__device__ inline void attend_split_of_row(FewQueries<kHeadDim, NewRow>& queries, FewWeights& shared, float* parts,
                                           Split& held, const RowAttention<Cache>& a, const Row& row, const Splits& splits,
                                           const Codes& y, int split, int kv_head, Wait wait) {
    const FewThread me;
    const int num_slots = a.num_slots(split), num_known = a.num_known(split);
    const bool owns_new = a.has_new(split);
    const i64 at = a.template at<kHeadDim>(split, kv_head);
    const float* cos_d = a.cos_sd + (i64)a.last * (kHeadDim / 2);
    const float* sin_d = a.sin_sd + (i64)a.last * (kHeadDim / 2);
    // The new key, the new value and the queries are a warp's each, the last warps' first: with few slots those have neither
    // keys nor values.
    constexpr int kNewKey = 0, kNewValue = 1, kFirstQuery = 2;
    const int first_role = kFewWarps - 1 - me.warp(), num_roles = kFirstQuery + a.queries_per_kv;
    auto is_played = [&](int role) { return role < num_roles && (owns_new || role >= kFirstQuery); };
    Rotation<kHeadDim> rotation;
    if (is_played(first_role)) rotation.fetch(first_role == kNewKey ? a.k_norm_d : a.q_norm_d, cos_d, sin_d);
    wait();

    for (int role = first_role; role < num_roles; role += kFewWarps) {
        if (!is_played(role)) continue;
        if (role >= kFewWarps) rotation.fetch(a.q_norm_d, cos_d, sin_d);
        const int query = role - kFirstQuery;
        float x[Rotation<kHeadDim>::kChannels];
        row.load(x, role == kNewKey ? a.k_column + kv_head * kHeadDim
                    : role == kNewValue ? a.v_column + kv_head * kHeadDim
                                        : (kv_head * a.queries_per_kv + query) * kHeadDim, kHeadDim);
        if (role == kNewValue) {
            // Values are loaded when this is there, or it is kept beside them.
#pragma unroll
            for (int i = 0; i < Rotation<kHeadDim>::kChannels; ++i) {
                const int d = me.lane() + i * kWarp;
                if (d < kHeadDim) a.v.put(at + num_known * kHeadDim + d, x[i]), held.keep_value(d, x[i]);
            }
        } else {
            rotation.turn(x, a.eps, [&](int d, float y) {
                if (role == kNewKey) queries.new_key.put(d, y);
                else queries.put(query, d, y);
            });
        }
    }
    sync_few();
    if (owns_new) {
        held.take_new(queries.new_key, num_known);
        if (first_role == kNewKey) a.k.put(at + num_known * kHeadDim, queries.new_key);
    }
    split_of_few_rows<kHeadDim>(shared, queries.fragments, held, a.queries_per_kv, num_slots, a.scale, parts);

    const int num_values = a.queries_per_kv * kHeadDim, first_head = kv_head * a.queries_per_kv;
    if (a.used_splits() > 1) {
        for (int i = this_thread(); i < num_values; i += kFewThreads) {
            const int r = i / kHeadDim, d = i % kHeadDim;
            splits.put(first_head + r, split, d, add_subtiles(parts + i, num_values, num_slots));
            if (d != 0) continue;
            splits.put_weights(first_head + r, split, shared.row_max[r], add_subtiles(shared.sums[r], 1, num_slots));
        }
        if constexpr (!Splits::kMergesHere) return;
        else if (!splits.merges(kv_head, split, a.used_splits())) return;
    }
    for (int i = this_thread(); i < num_values; i += kFewThreads) {
        const int r = i / kHeadDim, d = i % kHeadDim, head = first_head + r;
        RunningMerge merged;
        if constexpr (Splits::kMergesHere)
            if (a.used_splits() > 1) merged = splits.merged(head, d, a.used_splits());
        if (a.used_splits() == 1) {
            // What a merge with nothing gives.
            merged.sum = add_subtiles(shared.sums[r], 1, num_slots);
            merged.out = add_subtiles(parts + i, num_values, num_slots);
        }
        float scale;
        const int code = quantize_in_group(div_rn(merged.out, merged.sum), scale);
        y.put((kv_head * num_values + i) / kGroup, code, scale);
    }
}
