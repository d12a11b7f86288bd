// The kernels of many queries over a float16 cache; attention_many.cuh says how.

#include "common.cuh"
#include "attention_half.cuh"
#include "kv_rows.cuh"
#include "attention_ring.cuh"
#include "attention_many.cuh"

// Two blocks a multiprocessor, where its shared memory takes them.
#define ATTEND(SUFFIX, HEAD_DIM)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kTileThreads, 2)                                                    \
    attend_tiled_##SUFFIX(const float* q_mhd, const u16* k_hsd, const u16* v_hsd, const int* position,               \
                          float* out_mhd, int queries_per_kv, int m, int ctx, float scale) {                         \
        const HalfRows<HEAD_DIM> k = {k_hsd}, v = {v_hsd};                                                           \
        attend_tiled<HEAD_DIM, HalfRing<HEAD_DIM>>(q_mhd, k, v, position, out_mhd, queries_per_kv, m, ctx, scale);   \
    }

ATTEND(f16_16, 16)
ATTEND(f16_32, 32)
ATTEND(f16_64, 64)
ATTEND(f16_128, 128)
