// Causal grouped-query attention over float16 or int8 entries for few queries, a split at a time: what attention_few*.cu
// and token.cu share. attention_half.cuh has the sums and why a query's result does not depend on which kernel made it.

// RMSNorm and rotation of one head by one warp, as rope.cu. The weight and the angles do not depend on the row, so they
// are fetched before it is there. `put(d, y)` gets each channel.
template <int kHeadDim>
struct Rotation {
    static constexpr int kChannels = (kHeadDim + kWarp - 1) / kWarp;
    static constexpr int kHalf = kHeadDim / 2;
    float weight[kChannels], cosine[kChannels], sine[kChannels];

    __device__ static int channel(int i) { return threadIdx.x % kWarp + i * kWarp; }

    __device__ void fetch(const float* weight_d, const float* cos_d, const float* sin_d) {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const int d = channel(i), pair = d < kHalf ? d : d - kHalf;
            if (d >= kHeadDim) continue;
            weight[i] = weight_d[d], cosine[i] = cos_d[pair], sine[i] = sin_d[pair];
        }
    }

    template <typename Put>
    __device__ void turn(const float (&x)[kChannels], float eps, float* normed_d, Put put) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kChannels; ++i)
            if (channel(i) < kHeadDim) sum = fma_rn(x[i], x[i], sum);
        const float rstd = __frsqrt_rn(add_rn(div_rn(warp_sum(sum), (float)kHeadDim), eps));
#pragma unroll
        for (int i = 0; i < kChannels; ++i)
            if (channel(i) < kHeadDim) normed_d[channel(i)] = mul_rn(weight[i], mul_rn(x[i], rstd));
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const int d = channel(i);
            if (d >= kHeadDim) continue;
            const float other = d < kHalf ? -normed_d[d + kHalf] : normed_d[d - kHalf];
            put(d, add_rn(mul_rn(normed_d[d], cosine[i]), mul_rn(other, sine[i])));
        }
        __syncwarp();
    }
};

// Splits that are fetched before the first of them is merged: the merges are a chain, the fetches need not be.
constexpr int kMergedAtOnce = 8;

// What a block of few rows keeps in shared memory.
template <int kHeadDim, typename NewRow>
struct __align__(16) FewRows {
    u16 queries[kMmaRows * Shape<kHeadDim>::kQueryStride];
    union {
        float normed[kFewWarps][kHeadDim];     // on the way to the queries
        u16 weights[kMmaRows * kWeightStride];
    };
    float maxima[kMmaRows][kFewWarps + 4];     // so that rows' reads of 16 bytes meet no bank twice
    float row_max[kMmaRows];
    float sums[kSubtiles][kMmaRows];
    NewRow new_key, new_value;
};

// Dots of the query rows with a warp's keys, a chain of mma over the channels for each tile that has slots.
template <int kHeadDim, typename Rows>
__device__ inline void score_tiles(float (&dots)[kKeyTiles][4], const u16* query_rows, const Keys<Rows>& keys, int num_slots) {
    using S = Shape<kHeadDim>;
    const int quad = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
        dots[t][0] = dots[t][1] = dots[t][2] = dots[t][3] = 0.0f;
        if (tile_slot(t) >= num_slots) continue;
#pragma unroll
        for (int run = 0; run < S::kKeyRuns; ++run) {
            Run<S::kKeyHalves> top, bottom;
            const int channel = (run * 4 + j) * S::kKeyHalves;
            top.load(query_rows + quad * S::kQueryStride + channel);
            bottom.load(query_rows + (quad + 8) * S::kQueryStride + channel);
#pragma unroll
            for (int i = 0; i < S::kKeyHalves / 4; ++i) {
                const u32 q[4] = {top.words[2 * i], bottom.words[2 * i], top.words[2 * i + 1], bottom.words[2 * i + 1]};
                mma_m16n8k16(dots[t], q, keys.word(t, run, 2 * i), keys.word(t, run, 2 * i + 1));
            }
        }
    }
}

// One split for up to 16 query rows in shared memory: `out` [subtile][row][d] gets the weighted values of each subtile,
// shared.sums the sums of weights, row_max the maximum of each row. Every thread of the block takes part.
template <int kHeadDim, typename NewRow, typename Rows>
__device__ inline void split_of_few_rows(FewRows<kHeadDim, NewRow>& shared, const Keys<Rows>& keys, const Values<Rows>& values,
                                         int num_rows, int num_slots, float scale, float* out) {
    const int warp = threadIdx.x / kWarp, quad = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
    float scores[kKeyTiles][4];
    {
        score_tiles<kHeadDim>(scores, shared.queries, keys, num_slots);
        float top = minus_infinity(), bottom = minus_infinity();
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
            for (int c = 0; c < 4; ++c)
                scores[t][c] = tile_slot(t) + 2 * j + c % 2 < num_slots ? mul_rn(scores[t][c], scale) : minus_infinity();
            top = fmaxf(top, fmaxf(scores[t][0], scores[t][1]));
            bottom = fmaxf(bottom, fmaxf(scores[t][2], scores[t][3]));
        }
        top = quad_max(top), bottom = quad_max(bottom);
        if (j == 0) shared.maxima[quad][warp] = top, shared.maxima[quad + 8][warp] = bottom;
    }
    sync_few();
    float row_max[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int w = 0; w < kFewWarps; w += 4) {
            const float4 four = *(const float4*)&shared.maxima[quad + 8 * half][w];
            row_max[half] = fmaxf(row_max[half], fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
        }
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float p[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float s = scores[t][2 * half + c];
                p[c] = s == minus_infinity() ? 0.0f : exp2_fast(sub_rn(s, row_max[half]));
            }
            *(u32*)&shared.weights[(quad + 8 * half) * kWeightStride + tile_slot(t) + 2 * j] = pack_halves(p[0], p[1]);
        }
    sync_few();
    if (warp == 0 && j == 0) shared.row_max[quad] = row_max[0], shared.row_max[quad + 8] = row_max[1];

    const int subtile = warp / kWarpsPerSubtile, part = warp % kWarpsPerSubtile;
    constexpr int kHalves = Parts<kHeadDim>::kHalves;
    float acc[kHalves][4], sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int t = 0; t < kHalves; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0f;
    // Past the last slot weights and values are zero, and add nothing.
    if (subtile * kSubtile < num_slots)
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            u32 weights[4];
            load_weights(weights, shared.weights, subtile * kSubtile + step * 16);
            values.add(acc, sums, weights, step);
        }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const int row = quad + c / 2 * 8;
        if (row >= num_rows || part >= Parts<kHeadDim>::kNum) continue;
        float* to = out + (subtile * num_rows + row) * kHeadDim + part * Parts<kHeadDim>::kChannels + (2 * j + c % 2) * kHalves;
#pragma unroll
        for (int t = 0; t < kHalves; ++t) to[t] = acc[t][c];
        if (part == 0 && j == 0 && c % 2 == 0) shared.sums[subtile][row] = sums[c];
    }
    sync_few();
}

__device__ inline float add_subtiles(const float* parts, int stride) {
    float total = 0.0f;
#pragma unroll
    for (int t = 0; t < kSubtiles; ++t) total = add_rn(total, parts[t * stride]);
    return total;
}

// A row's joint projection in global memory, read past the first-level cache: others have just written it.
struct PlainRow {
    const float* qkv_n;

    template <int kChannels>
    __device__ void load(float (&x)[kChannels], int column, int count) const {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const int at = threadIdx.x % kWarp + i * kWarp;
            x[i] = at < count ? __ldcg(qkv_n + column + at) : 0.0f;
        }
    }
};

// Where activation codes go: a warp puts a group, one code a lane.
struct PlainCodes {
    i8* codes;
    float* scales;

    __device__ void put(int group, int code, float scale) const {
        codes[group * kGroup + threadIdx.x % kWarp] = (i8)code;
        if (threadIdx.x % kWarp == 0) scales[group] = scale;
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
        if (threadIdx.x == 0) {
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
    __device__ void add(RunningMerge& merged, Part& part, int, int, int) const { merged.add(part.max, part.sum, part.out); }
};

// One split of one kv head for one query: q/k norm and rotation, the write to the cache, attention, and, by the split
// that `splits` chooses, the merge and the activation codes. The cache is read first, then `wait` is called, then the row is
// read. `parts`: 4 * queries_per_kv * d floats of shared memory.
template <int kHeadDim, typename NewRow, typename Cache, typename Row, typename Splits, typename Codes, typename Wait>
__device__ inline void attend_split_of_row(FewRows<kHeadDim, NewRow>& shared, float* parts, const RowAttention<Cache>& a,
                                           const Row& row, const Splits& splits, const Codes& y, int split, int kv_head,
                                           Wait wait) {
    const int warp = threadIdx.x / kWarp;
    const int first_slot = split * kSplit, used_splits = a.used_splits();
    const int num_slots = min(kSplit, a.last + 1 - first_slot);
    const bool owns_new = split == used_splits - 1;
    const i64 at = ((i64)kv_head * a.ctx + first_slot) * kHeadDim;
    const int num_known = num_slots - owns_new;
    using Rows = typename Cache::template Rows<kHeadDim>;
    Keys<Rows> keys;
    keys.load(a.k.template from<kHeadDim>(at), num_known);
    Values<Rows> values;
    values.load(a.v.template from<kHeadDim>(at), num_known);
    const float* cos_d = a.cos_sd + (i64)a.last * (kHeadDim / 2);
    const float* sin_d = a.sin_sd + (i64)a.last * (kHeadDim / 2);
    const bool has_query = warp < a.queries_per_kv, turns_key = owns_new && warp == kFewWarps - 1;
    Rotation<kHeadDim> rotation;
    float x[Rotation<kHeadDim>::kChannels];
    if (has_query || turns_key) rotation.fetch(has_query ? a.q_norm_d : a.k_norm_d, cos_d, sin_d);
    wait();

    u16* query = shared.queries + warp * Shape<kHeadDim>::kQueryStride;
    if (has_query) {
        row.load(x, (kv_head * a.queries_per_kv + warp) * kHeadDim, kHeadDim);
        rotation.turn(x, a.eps, shared.normed[warp], [&](int d, float y) { query[d] = float_to_half(y); });
    } else {
        for (int d = threadIdx.x % kWarp; d < kHeadDim; d += kWarp) query[d] = 0;
    }
    if (turns_key) {
        if (has_query) rotation.fetch(a.k_norm_d, cos_d, sin_d);
        row.load(x, a.k_column + kv_head * kHeadDim, kHeadDim);
        rotation.turn(x, a.eps, shared.normed[warp], [&](int d, float y) { shared.new_key.put(d, y); });
    } else if (owns_new && warp == kFewWarps - 2) {
        row.load(x, a.v_column + kv_head * kHeadDim, kHeadDim);
#pragma unroll
        for (int i = 0; i < Rotation<kHeadDim>::kChannels; ++i)
            if (rotation.channel(i) < kHeadDim) shared.new_value.put(rotation.channel(i), x[i]);
    }
    sync_few();
    if (owns_new) {
        keys.put(shared.new_key, num_known);
        if (warp / kWarpsPerSubtile == num_known / kSubtile) values.put(shared.new_value, num_known);
        const i64 to = at + (i64)num_known * kHeadDim;
        for (int d = threadIdx.x; d < kHeadDim; d += kFewThreads) {
            a.k.stored[to + d] = shared.new_key.stored[d];
            a.v.stored[to + d] = shared.new_value.stored[d];
        }
        a.k.store_scales(to, shared.new_key);
        a.v.store_scales(to, shared.new_value);
    }
    split_of_few_rows<kHeadDim>(shared, keys, values, a.queries_per_kv, num_slots, a.scale, parts);

    const int num_values = a.queries_per_kv * kHeadDim, first_head = kv_head * a.queries_per_kv;
    if (used_splits > 1) {
        for (int i = threadIdx.x; i < num_values; i += kFewThreads) {
            const int r = i / kHeadDim, d = i % kHeadDim;
            splits.put(first_head + r, split, d, add_subtiles(parts + i, num_values));
            if (d == 0) splits.put_weights(first_head + r, split, shared.row_max[r], add_subtiles(&shared.sums[0][r], kMmaRows));
        }
        if (!splits.merges(kv_head, split, used_splits)) return;
    }
    for (int i = threadIdx.x; i < num_values; i += kFewThreads) {
        const int r = i / kHeadDim, d = i % kHeadDim, head = first_head + r;
        RunningMerge merged;
        if (used_splits == 1)
            merged.add(shared.row_max[r], add_subtiles(&shared.sums[0][r], kMmaRows), add_subtiles(parts + i, num_values));
        else
            for (int first = 0; first < used_splits; first += kMergedAtOnce) {
                typename Splits::Part part[kMergedAtOnce];
#pragma unroll
                for (int s = 0; s < kMergedAtOnce; ++s) splits.fetch(part[s], head, min(first + s, used_splits - 1), d);
#pragma unroll
                for (int s = 0; s < kMergedAtOnce; ++s)
                    if (first + s < used_splits) splits.add(merged, part[s], head, first + s, d);
            }
        float scale;
        const int code = quantize_in_group(div_rn(merged.out, merged.sum), scale);
        y.put((kv_head * num_values + i) / kGroup, code, scale);
    }
}
