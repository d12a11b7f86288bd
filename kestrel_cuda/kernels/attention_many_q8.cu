// The same over an int8 cache: the bits of a float16 cache that holds its entries (kv_rows.cuh).

#include "common.cuh"
#include "attention_half.cuh"
#include "kv_rows.cuh"
#include "attention_ring.cuh"
#include "attention_many.cuh"

// Two blocks a multiprocessor, where its shared memory takes them.
#define ATTEND(SUFFIX, HEAD_DIM)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kTileThreads, 2)                                                    \
    attend_tiled_##SUFFIX(const float* q_mhd, const i8* k_hsd, const u16* k_scales_hsg, const i8* v_hsd,             \
                          const u16* v_scales_hsg, const int* position, float* out_mhd, int queries_per_kv, int m,   \
                          int ctx, float scale) {                                                                    \
        const Int8Rows<HEAD_DIM> k = {k_hsd, k_scales_hsg}, v = {v_hsd, v_scales_hsg};                               \
        attend_tiled<HEAD_DIM, Int8Ring<HEAD_DIM>>(q_mhd, k, v, position, out_mhd, queries_per_kv, m, ctx, scale);   \
    }

ATTEND(q8_32, 32)
ATTEND(q8_64, 64)
ATTEND(q8_128, 128)
