// Causal grouped-query attention over a float16 cache for few queries: a block for every split, kv head and query.
// attention_half.cuh has the sums and why a query's result does not depend on which kernel made it.

#include "common.cuh"
#include "attention_half.cuh"
#include "attention_few.cuh"

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
    Values<kHeadDim> values;
    values.load(v_hsd + at, num_slots);
    const i64 first_head = (i64)row * num_heads + kv_head * queries_per_kv;
    for (int i = threadIdx.x; i < kMmaRows * kHeadDim; i += kFewThreads) {
        const int r = i / kHeadDim, d = i % kHeadDim;
        shared.queries[r * Shape<kHeadDim>::kQueryStride + d] =
            r < queries_per_kv ? float_to_half(q_mhd[(first_head + r) * kHeadDim + d]) : (u16)0;
    }
    __syncthreads();
    split_of_few_rows<kHeadDim>(shared, keys, values, queries_per_kv, num_slots, scale, parts);
    for (int i = threadIdx.x; i < queries_per_kv * kHeadDim; i += kFewThreads) {
        const i64 to = (first_head + i / kHeadDim) * num_splits + split;
        out_mhsd[to * kHeadDim + i % kHeadDim] = add_subtiles(parts + i, queries_per_kv * kHeadDim);
        if (i % kHeadDim == 0) {
            max_mhs[to] = shared.maxima[0][i / kHeadDim];
            sum_mhs[to] = add_subtiles(&shared.sums[0][i / kHeadDim], kMmaRows);
        }
    }
}

// One query from the joint projection to the next linear's input, in one kernel. Dynamic shared memory:
// 4 * queries_per_kv * d floats. Grid: (splits, kv_heads).
template <int kHeadDim>
__device__ inline void attend_row(const RowAttention& a, const PlainRow& row, const PlainCodes& y) {
    extern __shared__ __align__(16) float parts[];
    __shared__ __align__(16) FewRows<kHeadDim> shared;
    launch_dependents();
    // Read before the wait: the position and the old slots were written before the last plain launch, and between two
    // tokens there is always one.
    if (blockIdx.x >= a.used_splits()) {
        wait_for_previous();
        return;
    }
    attend_split_of_row<kHeadDim>(shared, parts, a, row, y, blockIdx.x, blockIdx.y, [] { wait_for_previous(); });
}

#define ATTEND(SUFFIX, HEAD_DIM)                                                                                       \
    extern "C" __global__ void __launch_bounds__(kFewThreads, 1)                                                       \
    attend_split_##SUFFIX(const float* q_mhd, const u16* k_hsd, const u16* v_hsd, const int* position,                 \
                          float* max_mhs, float* sum_mhs, float* out_mhsd, int queries_per_kv, int ctx, float scale) { \
        attend_split<HEAD_DIM>(q_mhd, k_hsd, v_hsd, position, max_mhs, sum_mhs, out_mhsd, queries_per_kv, ctx, scale); \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kFewThreads, 1)                                                       \
    attend_row_##SUFFIX(const float* qkv_n, const float* q_norm_d, const float* k_norm_d, const float* cos_sd,         \
                        const float* sin_sd, const int* position, u16* k_hsd, u16* v_hsd, float* max_hs, float* sum_hs, \
                        float* out_hsd, int* arrived_h, i8* y_codes, float* y_scales, int k_column, int v_column,      \
                        int queries_per_kv, int ctx, float scale, float eps) {                                         \
        const RowAttention a = {q_norm_d, k_norm_d, cos_sd,    sin_sd,   k_hsd,    v_hsd,          max_hs, sum_hs,     \
                                out_hsd,  arrived_h, *position, k_column, v_column, queries_per_kv, ctx,               \
                                (int)gridDim.x, scale, eps};                                                           \
        attend_row<HEAD_DIM>(a, {qkv_n}, {y_codes, y_scales});                                                         \
    }

ATTEND(f16_16, 16)
ATTEND(f16_32, 32)
ATTEND(f16_64, 64)
ATTEND(f16_128, 128)
