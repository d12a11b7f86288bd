// The kernels of attention_few.cu over an int8 cache: the bits of a float16 cache that holds its entries (kv_rows.cuh).

#include "common.cuh"
#include "attention_half.cuh"
#include "kv_rows.cuh"
#include "attention_held.cuh"
#include "attention_few.cuh"
#include "attention_few_kernels.cuh"

#define ATTEND(SUFFIX, HEAD_DIM)                                                                                       \
    extern "C" __global__ void __launch_bounds__(kFewThreads, 1)                                                       \
    attend_split_##SUFFIX(const float* q_mhd, const i8* k_hsd, const u16* k_scales_hsg, const i8* v_hsd,               \
                          const u16* v_scales_hsg, const int* position, float* max_mhs, float* sum_mhs,                \
                          float* out_mhsd, int queries_per_kv, int ctx, float scale) {                                 \
        const Int8Rows<HEAD_DIM> k = {k_hsd, k_scales_hsg}, v = {v_hsd, v_scales_hsg};                                 \
        attend_split<HEAD_DIM>(q_mhd, k, v, position, max_mhs, sum_mhs, out_mhsd, queries_per_kv, ctx, scale);         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kFewThreads, 1)                                                       \
    attend_row_##SUFFIX(const float* qkv_n, const float* q_norm_d, const float* k_norm_d, const float* cos_sd,         \
                        const float* sin_sd, const int* position, i8* k_hsd, u16* k_scales_hsg, i8* v_hsd,             \
                        u16* v_scales_hsg, float* max_hs, float* sum_hs, float* out_hsd, int* arrived_h, i8* y_codes,  \
                        float* y_scales, int k_column, int v_column, int queries_per_kv, int ctx, float scale,         \
                        float eps) {                                                                                   \
        const RowAttention<Int8Cache> a = {q_norm_d, k_norm_d, cos_sd, sin_sd, {k_hsd, k_scales_hsg}, {v_hsd, v_scales_hsg}, *position,\
            k_column, v_column, queries_per_kv, ctx, scale, eps};                                                      \
        attend_row<HEAD_DIM>(a, {qkv_n}, {max_hs, sum_hs, out_hsd, arrived_h, (int)gridDim.x}, {y_codes, y_scales});   \
    }

ATTEND(q8_32, 32)
ATTEND(q8_64, 64)
ATTEND(q8_128, 128)
