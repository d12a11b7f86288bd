// Causal grouped-query attention over a float16 cache for few queries: a block for every split, kv head and query.
// attention_half.cuh has the sums and why a query's result does not depend on which kernel made it.

#include "common.cuh"
#include "attention_half.cuh"
#include "kv_rows.cuh"
#include "attention_held.cuh"
#include "attention_few.cuh"
#include "attention_few_kernels.cuh"

#define ATTEND(SUFFIX, HEAD_DIM)                                                                                       \
    extern "C" __global__ void __launch_bounds__(kFewThreads, 1)                                                       \
    attend_split_##SUFFIX(const float* q_mhd, const u16* k_hsd, const u16* v_hsd, const int* position,                 \
                          float* max_mhs, float* sum_mhs, float* out_mhsd, int queries_per_kv, int ctx, float scale) { \
        const HalfRows<HEAD_DIM> k = {k_hsd}, v = {v_hsd};                                                             \
        attend_split<HEAD_DIM>(q_mhd, k, v, position, max_mhs, sum_mhs, out_mhsd, queries_per_kv, ctx, scale);         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kFewThreads, 1)                                                       \
    attend_row_##SUFFIX(const float* qkv_n, const float* q_norm_d, const float* k_norm_d, const float* cos_sd,         \
                        const float* sin_sd, const int* position, u16* k_hsd, u16* v_hsd, float* max_hs, float* sum_hs, \
                        float* out_hsd, int* arrived_h, i8* y_codes, float* y_scales, int k_column, int v_column,      \
                        int queries_per_kv, int ctx, float scale, float eps) {                                         \
        const RowAttention<HalfCache> a = {q_norm_d, k_norm_d, cos_sd, sin_sd, {k_hsd}, {v_hsd}, *position,            \
            k_column, v_column, queries_per_kv, ctx, scale, eps};                                                      \
        attend_row<HEAD_DIM>(a, {qkv_n}, {max_hs, sum_hs, out_hsd, arrived_h, (int)gridDim.x}, {y_codes, y_scales});   \
    }

ATTEND(f16_16, 16)
ATTEND(f16_32, 32)
ATTEND(f16_64, 64)
ATTEND(f16_128, 128)
