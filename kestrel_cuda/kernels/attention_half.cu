// Causal grouped-query attention over a float16 key-value cache on the tensor cores, for any number of queries.
//
// The sums are fixed by cache position alone. The cache is cut into splits of 256 slots. For one query row and a split:
// scores are a chain of mma over the head's channels (query rounded to float16, float32 sums) times the scale, in units
// of log2; the split's maximum; weights are powers of two rounded to float16; weighted values and the sum of weights
// are a chain of mma over the 64 slots of a subtile, subtiles added in ascending order. Splits are merged in ascending
// order. A row of an mma does not depend on the others, and every kernel below feeds the same instructions in the same
// order, so a query's result does not depend on how many queries came with it.
//
// Which channel or slot stands where in an mma is free as long as both operands agree: lane j (of 4) takes channels
// 8j .. 8j + 7 of a run of 32, so a key is read 16 bytes at a time; column c of the value tiles takes HeadDim / 16
// neighbouring channels.

#include "common.cuh"

constexpr int kMmaRows = 16;
constexpr u32 kHalfOnes = 0x3c003c00u;

__device__ inline void mma_m16n8k16(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline u32 pack_halves(float low, float high) {
    return (u32)float_to_half(low) | ((u32)float_to_half(high) << 16);
}

// The lower (which = 0) or upper halves of two words, side by side.
__device__ inline u32 pair_halves(u32 a, u32 b, int which) { return __byte_perm(a, b, which ? 0x7632 : 0x5410); }

// A run of halves as words: 16, 8, 4 or 2 bytes.
template <int kHalves>
struct Run {
    static constexpr int kWords = kHalves < 2 ? 1 : kHalves / 2;
    u32 words[kWords];

    __device__ void load(const u16* from) {
        if constexpr (kHalves == 8) {
            const uint4 v = *(const uint4*)from;
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        } else if constexpr (kHalves == 4) {
            const uint2 v = *(const uint2*)from;
            words[0] = v.x, words[1] = v.y;
        } else if constexpr (kHalves == 2) {
            words[0] = *(const u32*)from;
        } else {
            words[0] = *from;
        }
    }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = 0;
    }
};

template <int kHeadDim>
struct Shape {
    static constexpr int kKeyHalves = kHeadDim >= 32 ? 8 : 4;            // channels a lane reads of a key at a time
    static constexpr int kKeyRuns = kHeadDim / (4 * kKeyHalves);
    static constexpr int kSteps = kHeadDim / 16;                         // mma steps of a score
    static constexpr int kValueHalves = kHeadDim / 16;                   // channels a lane reads of a value: half a head
    static constexpr int kQueryStride = kHeadDim + 8;                    // halves
};

// Query fragments of rows lane / 4 and lane / 4 + 8, from shared memory, for every step.
template <int kHeadDim>
__device__ inline void load_queries(u32 (&q)[Shape<kHeadDim>::kSteps][4], const u16* rows) {
    using S = Shape<kHeadDim>;
    const int quad = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
#pragma unroll
    for (int run = 0; run < S::kKeyRuns; ++run) {
        Run<S::kKeyHalves> top, bottom;
        const int channel = (run * 4 + j) * S::kKeyHalves;
        top.load(rows + quad * S::kQueryStride + channel);
        bottom.load(rows + (quad + 8) * S::kQueryStride + channel);
#pragma unroll
        for (int i = 0; i < S::kKeyHalves / 4; ++i) {
            u32* a = q[run * (S::kKeyHalves / 4) + i];
            a[0] = top.words[2 * i], a[1] = bottom.words[2 * i], a[2] = top.words[2 * i + 1], a[3] = bottom.words[2 * i + 1];
        }
    }
}

// Dots of the query rows with the keys of 8 slots: this lane's key is that of slot lane / 4.
template <int kHeadDim>
__device__ inline void score_tile(float (&dots)[4], const u32 (&q)[Shape<kHeadDim>::kSteps][4],
                                  const Run<Shape<kHeadDim>::kKeyHalves> (&key)[Shape<kHeadDim>::kKeyRuns]) {
    constexpr int kPerRun = Shape<kHeadDim>::kKeyHalves / 4;
    dots[0] = dots[1] = dots[2] = dots[3] = 0.0f;
#pragma unroll
    for (int step = 0; step < Shape<kHeadDim>::kSteps; ++step) {
        const u32* words = key[step / kPerRun].words + step % kPerRun * 2;
        mma_m16n8k16(dots, q[step], words[0], words[1]);
    }
}

// Add the weighted values of 16 slots for half of a head's channels, and the weights themselves to `sums`. `values` are
// this lane's channels of slots 2j, 2j + 1, 2j + 8, 2j + 9; weights the fragment of 16 rows by 16 slots.
template <int kHeadDim>
__device__ inline void add_values(float (&out)[Shape<kHeadDim>::kValueHalves][4], float (&sums)[4], const u32 (&weights)[4],
                                  const Run<Shape<kHeadDim>::kValueHalves> (&values)[4]) {
#pragma unroll
    for (int t = 0; t < Shape<kHeadDim>::kValueHalves; ++t)
        mma_m16n8k16(out[t], weights, pair_halves(values[0].words[t / 2], values[1].words[t / 2], t % 2),
                     pair_halves(values[2].words[t / 2], values[3].words[t / 2], t % 2));
    mma_m16n8k16(sums, weights, kHalfOnes, kHalfOnes);
}

constexpr int kWeightStride = kSplit + 8;      // halves

__device__ inline void load_weights(u32 (&weights)[4], const u16* rows, int slot) {
    const int quad = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
    const u16* top = rows + quad * kWeightStride + slot + 2 * j;
    const u16* bottom = top + 8 * kWeightStride;
    weights[0] = *(const u32*)top, weights[1] = *(const u32*)bottom;
    weights[2] = *(const u32*)(top + 8), weights[3] = *(const u32*)(bottom + 8);
}

// The larger of a value and those of the other three lanes of its row.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ inline u16 saturated_half(float x) { return float_to_half(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); }

// RMSNorm and rotation of one head by one warp, as rope.cu: x_d [d] -> y_d [d], both in shared or global memory. What
// goes to the cache saturates; queries do not.
template <int kHeadDim, bool kSaturates>
__device__ inline void norm_rotate(const float* x_d, const float* weight_d, const float* cos_d, const float* sin_d, float eps,
                                   float* normed_d, u16* y_d) {
    const int lane = threadIdx.x % kWarp;
    float sum = 0.0f;
    for (int d = lane; d < kHeadDim; d += kWarp) sum = fma_rn(x_d[d], x_d[d], sum);
    const float rstd = __frsqrt_rn(add_rn(div_rn(warp_sum(sum), (float)kHeadDim), eps));
    for (int d = lane; d < kHeadDim; d += kWarp) normed_d[d] = mul_rn(weight_d[d], mul_rn(x_d[d], rstd));
    __syncwarp();
    constexpr int kHalf = kHeadDim / 2;
    for (int d = lane; d < kHeadDim; d += kWarp) {
        const int pair = d < kHalf ? d : d - kHalf;
        const float other = d < kHalf ? -normed_d[d + kHalf] : normed_d[d - kHalf];
        const float y = add_rn(mul_rn(normed_d[d], cos_d[pair]), mul_rn(other, sin_d[pair]));
        y_d[d] = kSaturates ? saturated_half(y) : float_to_half(y);
    }
    __syncwarp();
}

// What a block of few rows keeps in shared memory.
template <int kHeadDim>
struct FewRows {
    u16 queries[kMmaRows * Shape<kHeadDim>::kQueryStride];
    u16 weights[kMmaRows * kWeightStride];
    float maxima[kAttentionWarps][kMmaRows];
    float sums[kSubtiles][kMmaRows];
    float normed[kAttentionWarps][kHeadDim];
    u16 new_key[kHeadDim], new_value[kHeadDim];
};

// The keys of a warp's 32 slots, in registers. Slots from num_known on read as zero.
template <int kHeadDim>
struct Keys {
    using S = Shape<kHeadDim>;
    Run<S::kKeyHalves> of[4][S::kKeyRuns];

    __device__ void load(const u16* k_sd, int num_known) {
        const int first = threadIdx.x / kWarp * 32 + threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int run = 0; run < S::kKeyRuns; ++run) {
                if (first + t * 8 < num_known) of[t][run].load(k_sd + (i64)(first + t * 8) * kHeadDim + (run * 4 + j) * S::kKeyHalves);
                else of[t][run].clear();
            }
    }

    // Put in the key of one more slot, from shared memory.
    __device__ void put(const u16* key_d, int new_slot) {
        const int first = threadIdx.x / kWarp * 32 + threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int t = 0; t < 4; ++t)
            if (first + t * 8 == new_slot)
#pragma unroll
                for (int run = 0; run < S::kKeyRuns; ++run) of[t][run].load(key_d + (run * 4 + j) * S::kKeyHalves);
    }
};

// The values of a warp's subtile for its half of the channels, in registers; likewise.
template <int kHeadDim>
struct Values {
    using S = Shape<kHeadDim>;
    Run<S::kValueHalves> of[4][4];

    __device__ static int slot(int step, int i) {
        return threadIdx.x / kWarp / 2 * kSubtile + step * 16 + 2 * (threadIdx.x % 4) + i % 2 + i / 2 * 8;
    }

    __device__ static int channel() {
        return threadIdx.x / kWarp % 2 * (kHeadDim / 2) + threadIdx.x % kWarp / 4 * S::kValueHalves;
    }

    __device__ void load(const u16* v_sd, int num_known, const u16* new_value_d, int new_slot) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int s = slot(step, i);
                if (s < num_known) of[step][i].load(v_sd + (i64)s * kHeadDim + channel());
                else if (s == new_slot) of[step][i].load(new_value_d + channel());
                else of[step][i].clear();
            }
    }
};

// One split for up to 16 query rows in shared memory: `out` [subtile][row][d] gets the weighted values of each subtile,
// shared.sums the sums of weights, maxima[0] the maximum of each row. The first num_known of num_slots values are in
// the cache, one more may be in shared memory. Every thread of the block takes part.
template <int kHeadDim>
__device__ inline void split_of_few_rows(FewRows<kHeadDim>& shared, const Keys<kHeadDim>& keys, const u16* v_sd, int num_known,
                                         int num_rows, int num_slots, float scale, float* out) {
    using S = Shape<kHeadDim>;
    const int warp = threadIdx.x / kWarp, quad = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
    float scores[4][4];
    {
        u32 q[S::kSteps][4];
        load_queries<kHeadDim>(q, shared.queries);
        float top = minus_infinity(), bottom = minus_infinity();
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            score_tile<kHeadDim>(scores[t], q, keys.of[t]);
#pragma unroll
            for (int c = 0; c < 4; ++c)
                scores[t][c] = warp * 32 + t * 8 + 2 * j + c % 2 < num_slots ? mul_rn(scores[t][c], scale) : minus_infinity();
            top = fmaxf(top, fmaxf(scores[t][0], scores[t][1]));
            bottom = fmaxf(bottom, fmaxf(scores[t][2], scores[t][3]));
        }
        top = quad_max(top), bottom = quad_max(bottom);
        if (j == 0) shared.maxima[warp][quad] = top, shared.maxima[warp][quad + 8] = bottom;
    }
    // On their way while the block agrees on its maxima; the keys' registers are free by now.
    Values<kHeadDim> values;
    values.load(v_sd, num_known, shared.new_value, num_known < num_slots ? num_known : -1);
    __syncthreads();
    float row_max[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w)
#pragma unroll
        for (int half = 0; half < 2; ++half) row_max[half] = fmaxf(row_max[half], shared.maxima[w][quad + 8 * half]);
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float p[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float s = scores[t][2 * half + c];
                p[c] = s == minus_infinity() ? 0.0f : exp2_fast(sub_rn(s, row_max[half]));
            }
            *(u32*)&shared.weights[(quad + 8 * half) * kWeightStride + warp * 32 + t * 8 + 2 * j] = pack_halves(p[0], p[1]);
        }
    __syncthreads();
    if (warp == 0 && j == 0) shared.maxima[0][quad] = row_max[0], shared.maxima[0][quad + 8] = row_max[1];

    const int subtile = warp / 2, half = warp % 2;
    float acc[S::kValueHalves][4], sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int t = 0; t < S::kValueHalves; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        u32 weights[4];
        load_weights(weights, shared.weights, subtile * kSubtile + step * 16);
        add_values<kHeadDim>(acc, sums, weights, values.of[step]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const int row = quad + c / 2 * 8;
        if (row >= num_rows) continue;
        float* to = out + (subtile * num_rows + row) * kHeadDim + half * (kHeadDim / 2) + (2 * j + c % 2) * S::kValueHalves;
#pragma unroll
        for (int t = 0; t < S::kValueHalves; ++t) to[t] = acc[t][c];
        if (half == 0 && j == 0 && c % 2 == 0) shared.sums[subtile][row] = sums[c];
    }
    __syncthreads();
}

__device__ inline float add_subtiles(const float* parts, int stride) {
    float total = 0.0f;
#pragma unroll
    for (int t = 0; t < kSubtiles; ++t) total = add_rn(total, parts[t * stride]);
    return total;
}

// Few queries: one block a (split, kv head, query) writes that split's maximum, sum and weighted values, merged by
// attend_merge. q_mhd [m][heads][d]; k_hsd, v_hsd [kv_heads][ctx][d]; max_mhs, sum_mhs [m][heads][splits];
// out_mhsd [..][splits][d]. Dynamic shared memory: 4 * queries_per_kv * d floats. Grid: (splits, kv_heads, m).
template <int kHeadDim>
__device__ inline void attend_split(const float* q_mhd, const u16* k_hsd, const u16* v_hsd, const int* position, float* max_mhs,
                                    float* sum_mhs, float* out_mhsd, int queries_per_kv, int ctx, float scale) {
    extern __shared__ __align__(16) float parts[];
    __shared__ __align__(16) FewRows<kHeadDim> shared;
    const int split = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
    const int num_splits = gridDim.x, num_heads = gridDim.y * queries_per_kv;
    const int last = *position + row, first_slot = split * kSplit;
    if (first_slot > last) return;
    const int num_slots = min(kSplit, last + 1 - first_slot);
    const i64 at = ((i64)kv_head * ctx + first_slot) * kHeadDim;
    Keys<kHeadDim> keys;
    keys.load(k_hsd + at, num_slots);
    const i64 first_head = (i64)row * num_heads + kv_head * queries_per_kv;
    for (int i = threadIdx.x; i < kMmaRows * kHeadDim; i += kAttentionThreads) {
        const int r = i / kHeadDim, d = i % kHeadDim;
        shared.queries[r * Shape<kHeadDim>::kQueryStride + d] =
            r < queries_per_kv ? float_to_half(q_mhd[(first_head + r) * kHeadDim + d]) : (u16)0;
    }
    __syncthreads();
    split_of_few_rows<kHeadDim>(shared, keys, v_hsd + at, num_slots, queries_per_kv, num_slots, scale, parts);
    for (int i = threadIdx.x; i < queries_per_kv * kHeadDim; i += kAttentionThreads) {
        const i64 to = (first_head + i / kHeadDim) * num_splits + split;
        out_mhsd[to * kHeadDim + i % kHeadDim] = add_subtiles(parts + i, queries_per_kv * kHeadDim);
        if (i % kHeadDim == 0) {
            max_mhs[to] = shared.maxima[0][i / kHeadDim];
            sum_mhs[to] = add_subtiles(&shared.sums[0][i / kHeadDim], kMmaRows);
        }
    }
}

// One query from the joint projection to the next linear's input: q/k norm and rotation, the write to the cache, its
// attention, and the activation codes, in one kernel. The block that ends last for a kv head merges its splits.
// qkv_n holds q, k, v from the given columns; arrived_h [kv_heads] counts blocks and is zero between launches;
// queries_per_kv * d divides by 32. Dynamic shared memory: 4 * queries_per_kv * d floats. Grid: (splits, kv_heads).
template <int kHeadDim>
__device__ inline void attend_row(const float* qkv_n, const float* q_norm_d, const float* k_norm_d, const float* cos_sd,
                                  const float* sin_sd, const int* position, u16* k_hsd, u16* v_hsd, float* max_hs, float* sum_hs,
                                  float* out_hsd, int* arrived_h, i8* y_codes, float* y_scales, int k_column, int v_column,
                                  int queries_per_kv, int ctx, float scale, float eps) {
    extern __shared__ __align__(16) float parts[];
    __shared__ __align__(16) FewRows<kHeadDim> shared;
    __shared__ int is_last;
    const int split = blockIdx.x, kv_head = blockIdx.y, num_splits = gridDim.x;
    const int warp = threadIdx.x / kWarp;
    launch_dependents();
    // Read before the wait: the position and the old slots were written before the last plain launch, and between two
    // tokens there is always one.
    const int last = *position, first_slot = split * kSplit;
    if (first_slot > last) {
        wait_for_previous();
        return;
    }
    const int num_slots = min(kSplit, last + 1 - first_slot), used_splits = last / kSplit + 1;
    const bool owns_new = split == used_splits - 1;
    const i64 at = ((i64)kv_head * ctx + first_slot) * kHeadDim;
    const int num_known = num_slots - owns_new;
    Keys<kHeadDim> keys;
    keys.load(k_hsd + at, num_known);
    const float* cos_d = cos_sd + (i64)last * (kHeadDim / 2);
    const float* sin_d = sin_sd + (i64)last * (kHeadDim / 2);
    wait_for_previous();

    for (int r = warp; r < kMmaRows; r += kAttentionWarps) {
        u16* query = shared.queries + r * Shape<kHeadDim>::kQueryStride;
        if (r < queries_per_kv)
            norm_rotate<kHeadDim, false>(qkv_n + (kv_head * queries_per_kv + r) * kHeadDim, q_norm_d, cos_d, sin_d, eps, shared.normed[warp],
                                  query);
        else
            for (int d = threadIdx.x % kWarp; d < kHeadDim; d += kWarp) query[d] = 0;
    }
    if (owns_new) {
        if (warp == kAttentionWarps - 1)
            norm_rotate<kHeadDim, true>(qkv_n + k_column + kv_head * kHeadDim, k_norm_d, cos_d, sin_d, eps, shared.normed[warp],
                                  shared.new_key);
        else if (warp == kAttentionWarps - 2)
            for (int d = threadIdx.x % kWarp; d < kHeadDim; d += kWarp)
                shared.new_value[d] = saturated_half(qkv_n[v_column + kv_head * kHeadDim + d]);
    }
    __syncthreads();
    if (owns_new) {
        keys.put(shared.new_key, num_known);
        const i64 to = at + (i64)num_known * kHeadDim;
        for (int d = threadIdx.x; d < kHeadDim; d += kAttentionThreads) {
            k_hsd[to + d] = shared.new_key[d];
            v_hsd[to + d] = shared.new_value[d];
        }
    }
    split_of_few_rows<kHeadDim>(shared, keys, v_hsd + at, num_known, queries_per_kv, num_slots, scale, parts);

    const int num_values = queries_per_kv * kHeadDim, first_head = kv_head * queries_per_kv;
    if (used_splits > 1) {
        for (int i = threadIdx.x; i < num_values; i += kAttentionThreads) {
            const i64 to = (i64)(first_head + i / kHeadDim) * num_splits + split;
            out_hsd[to * kHeadDim + i % kHeadDim] = add_subtiles(parts + i, num_values);
            if (i % kHeadDim == 0) {
                max_hs[to] = shared.maxima[0][i / kHeadDim];
                sum_hs[to] = add_subtiles(&shared.sums[0][i / kHeadDim], kMmaRows);
            }
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) is_last = atomicAdd(&arrived_h[kv_head], 1) == used_splits - 1;
        __syncthreads();
        if (!is_last) return;
        if (threadIdx.x == 0) arrived_h[kv_head] = 0;
        __threadfence();
    }
    for (int i = threadIdx.x; i < num_values; i += kAttentionThreads) {
        const int r = i / kHeadDim;
        float running_max = minus_infinity(), running_sum = 0.0f, out = 0.0f;
        for (int s = 0; s < used_splits; ++s) {
            const i64 from = (i64)(first_head + r) * num_splits + s;
            float split_max, split_sum, split_out, keep, take, merged_max;
            if (used_splits > 1) {
                split_max = __ldcg(max_hs + from), split_sum = __ldcg(sum_hs + from);
                split_out = __ldcg(out_hsd + from * kHeadDim + i % kHeadDim);
            } else {
                split_max = shared.maxima[0][r], split_sum = add_subtiles(&shared.sums[0][r], kMmaRows);
                split_out = add_subtiles(parts + i, num_values);
            }
            merge_weights(running_max, split_max, keep, take, merged_max);
            running_sum = merge(running_sum, keep, split_sum, take);
            out = merge(out, keep, split_out, take);
            running_max = merged_max;
        }
        const int first = kv_head * num_values + i / kWarp * kWarp;
        quantize_group(div_rn(out, running_sum), y_codes + first, y_scales + first / kGroup);
    }
}

// Many queries: a block takes 64 (query, head) rows of one kv head and walks the splits, merging as it goes; a pair of
// warps shares 16 rows: half of a split's slots each for the scores, half of the channels each for the values.
// Row r is query r / queries_per_kv of the block's tile, head r % queries_per_kv. Grid: (ceil(m / queries), kv_heads).
constexpr int kTileRows = 64;

template <int kHeadDim>
struct ManyRows {
    static constexpr int kKeyStride = kHeadDim + (kHeadDim == 32 ? 0 : 32);  // halves; free of bank conflicts
    static constexpr int kValueStride = kHeadDim + 8;
    u16 queries[kTileRows * Shape<kHeadDim>::kQueryStride];
    u16 weights[kTileRows * kWeightStride];
    union {
        u16 keys[2][kSubtile * kKeyStride];
        u16 values[kSubtile * kValueStride];
    };
    float maxima[2][kTileRows];
};

template <int kHeadDim>
__device__ inline void attend_tiled(const float* q_mhd, const u16* k_hsd, const u16* v_hsd, const int* position, float* out_mhd,
                                    int queries_per_kv, int m, int ctx, float scale) {
    using S = Shape<kHeadDim>;
    using Tile = ManyRows<kHeadDim>;
    extern __shared__ __align__(16) unsigned char bytes[];
    Tile& shared = *(Tile*)bytes;
    const int kv_head = blockIdx.y, num_heads = gridDim.y * queries_per_kv;
    const int tile_queries = kTileRows / queries_per_kv;
    const int first_query = blockIdx.x * tile_queries;
    const int num_rows = min(tile_queries, m - first_query) * queries_per_kv;
    const int start = *position + first_query;
    const int last = start + (num_rows - 1) / queries_per_kv;
    const u16* k_sd = k_hsd + (i64)kv_head * ctx * kHeadDim;
    const u16* v_sd = v_hsd + (i64)kv_head * ctx * kHeadDim;
    const int warp = threadIdx.x / kWarp, quad = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
    const int first_row = warp / 2 * kMmaRows, half = warp % 2;

    for (int i = threadIdx.x; i < kTileRows * kHeadDim; i += kAttentionThreads) {
        const int r = i / kHeadDim, d = i % kHeadDim;
        const i64 head = (i64)(first_query + r / queries_per_kv) * num_heads + kv_head * queries_per_kv + r % queries_per_kv;
        shared.queries[r * S::kQueryStride + d] = r < num_rows ? float_to_half(q_mhd[head * kHeadDim + d]) : (u16)0;
    }
    int last_slot[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = first_row + quad + 8 * h;
        last_slot[h] = r < num_rows ? start + r / queries_per_kv : -1;
    }

    constexpr int kVector = 8;
    auto load_tile = [&](u16* tile, int stride, const u16* from, int slot0) {
        for (int i = threadIdx.x; i < kSubtile * kHeadDim / kVector; i += kAttentionThreads) {
            const int s = i / (kHeadDim / kVector), d = i % (kHeadDim / kVector) * kVector;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (slot0 + s <= last) value = *(const uint4*)(from + (i64)(slot0 + s) * kHeadDim + d);
            *(uint4*)&tile[s * stride + d] = value;
        }
    };

    float running_max[2] = {minus_infinity(), minus_infinity()}, running_sum[2] = {0.0f, 0.0f};
    float out[S::kValueHalves][4];
#pragma unroll
    for (int t = 0; t < S::kValueHalves; ++t) out[t][0] = out[t][1] = out[t][2] = out[t][3] = 0.0f;

    for (int first_slot = 0; first_slot <= last; first_slot += kSplit) {
        float scores[16][4];
#pragma unroll
        for (int round = 0; round < 2; ++round) {
            __syncthreads();
            load_tile(shared.keys[0], Tile::kKeyStride, k_sd, first_slot + round * kSubtile);
            load_tile(shared.keys[1], Tile::kKeyStride, k_sd, first_slot + kSplit / 2 + round * kSubtile);
            __syncthreads();
            u32 q[S::kSteps][4];
            load_queries<kHeadDim>(q, shared.queries + first_row * S::kQueryStride);
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                Run<S::kKeyHalves> key[S::kKeyRuns];
                const u16* row = shared.keys[half] + (t * 8 + quad) * Tile::kKeyStride;
#pragma unroll
                for (int run = 0; run < S::kKeyRuns; ++run) key[run].load(row + (run * 4 + j) * S::kKeyHalves);
                float* tile = scores[round * 8 + t];
                float dots[4];
                score_tile<kHeadDim>(dots, q, key);
                const int slot = first_slot + half * (kSplit / 2) + round * kSubtile + t * 8 + 2 * j;
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    tile[c] = slot + c % 2 <= last_slot[c / 2] ? mul_rn(dots[c], scale) : minus_infinity();
            }
        }
        float row_max[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
        for (int t = 0; t < 16; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) row_max[c / 2] = fmaxf(row_max[c / 2], scores[t][c]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row_max[h] = quad_max(row_max[h]);
            if (j == 0) shared.maxima[half][first_row + quad + 8 * h] = row_max[h];
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) row_max[h] = fmaxf(row_max[h], shared.maxima[1 - half][first_row + quad + 8 * h]);
#pragma unroll
        for (int t = 0; t < 16; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float p[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float s = scores[t][2 * h + c];
                    p[c] = s == minus_infinity() ? 0.0f : exp2_fast(sub_rn(s, row_max[h]));
                }
                *(u32*)&shared.weights[(first_row + quad + 8 * h) * kWeightStride + half * (kSplit / 2) + t * 8 + 2 * j] =
                    pack_halves(p[0], p[1]);
            }
        float keep[2], take[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float merged_max;
            merge_weights(running_max[h], row_max[h], keep[h], take[h], merged_max);
            running_max[h] = merged_max;
        }
        float split_out[S::kValueHalves][4], split_sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < S::kValueHalves; ++t) split_out[t][0] = split_out[t][1] = split_out[t][2] = split_out[t][3] = 0.0f;
        for (int subtile = 0; subtile < kSubtiles; ++subtile) {
            const int slot0 = first_slot + subtile * kSubtile;
            if (slot0 > last) break;
            __syncthreads();
            load_tile(shared.values, Tile::kValueStride, v_sd, slot0);
            __syncthreads();
            float acc[S::kValueHalves][4], sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int t = 0; t < S::kValueHalves; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0f;
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                u32 weights[4];
                load_weights(weights, shared.weights + first_row * kWeightStride, subtile * kSubtile + step * 16);
                Run<S::kValueHalves> values[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int s = step * 16 + 2 * j + i % 2 + i / 2 * 8;
                    values[i].load(shared.values + s * Tile::kValueStride + half * (kHeadDim / 2) + quad * S::kValueHalves);
                }
                add_values<kHeadDim>(acc, sums, weights, values);
            }
#pragma unroll
            for (int t = 0; t < S::kValueHalves; ++t)
#pragma unroll
                for (int c = 0; c < 4; ++c) split_out[t][c] = add_rn(split_out[t][c], acc[t][c]);
            split_sum[0] = add_rn(split_sum[0], sums[0]);
            split_sum[1] = add_rn(split_sum[1], sums[2]);
        }
#pragma unroll
        for (int t = 0; t < S::kValueHalves; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) out[t][c] = merge(out[t][c], keep[c / 2], split_out[t][c], take[c / 2]);
#pragma unroll
        for (int h = 0; h < 2; ++h) running_sum[h] = merge(running_sum[h], keep[h], split_sum[h], take[h]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const int r = first_row + quad + c / 2 * 8;
        if (r >= num_rows) continue;
        const i64 head = (i64)(first_query + r / queries_per_kv) * num_heads + kv_head * queries_per_kv + r % queries_per_kv;
        float* to = out_mhd + head * kHeadDim + half * (kHeadDim / 2) + (2 * j + c % 2) * S::kValueHalves;
#pragma unroll
        for (int t = 0; t < S::kValueHalves; ++t) to[t] = div_rn(out[t][c], running_sum[c / 2]);
    }
}

#define ATTEND(SUFFIX, HEAD_DIM)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kAttentionThreads, 1)                                               \
    attend_split_##SUFFIX(const float* q_mhd, const u16* k_hsd, const u16* v_hsd, const int* position,               \
                          float* max_mhs, float* sum_mhs, float* out_mhsd, int queries_per_kv, int ctx, float scale) { \
        attend_split<HEAD_DIM>(q_mhd, k_hsd, v_hsd, position, max_mhs, sum_mhs, out_mhsd, queries_per_kv, ctx, scale); \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kAttentionThreads, 2)                                               \
    attend_row_##SUFFIX(const float* qkv_n, const float* q_norm_d, const float* k_norm_d, const float* cos_sd,       \
                        const float* sin_sd, const int* position, u16* k_hsd, u16* v_hsd, float* max_hs, float* sum_hs, \
                        float* out_hsd, int* arrived_h, i8* y_codes, float* y_scales, int k_column, int v_column,    \
                        int queries_per_kv, int ctx, float scale, float eps) {                                       \
        attend_row<HEAD_DIM>(qkv_n, q_norm_d, k_norm_d, cos_sd, sin_sd, position, k_hsd, v_hsd, max_hs, sum_hs, out_hsd, \
                             arrived_h, y_codes, y_scales, k_column, v_column, queries_per_kv, ctx, scale, eps);     \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kAttentionThreads, 1)                                               \
    attend_tiled_##SUFFIX(const float* q_mhd, const u16* k_hsd, const u16* v_hsd, const int* position,               \
                          float* out_mhd, int queries_per_kv, int m, int ctx, float scale) {                         \
        attend_tiled<HEAD_DIM>(q_mhd, k_hsd, v_hsd, position, out_mhd, queries_per_kv, m, ctx, scale);               \
    }

ATTEND(f16_16, 16)
ATTEND(f16_32, 32)
ATTEND(f16_64, 64)
ATTEND(f16_128, 128)
