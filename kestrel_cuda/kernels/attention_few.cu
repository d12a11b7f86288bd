// Causal grouped-query attention over a float16 cache for few queries: a block for every split, kv head and query.
// attention_half.cuh has the sums and why a query's result does not depend on which kernel made it.

#include "common.cuh"
#include "attention_half.cuh"

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
    }

ATTEND(f16_16, 16)
ATTEND(f16_32, 32)
ATTEND(f16_64, 64)
ATTEND(f16_128, 128)
