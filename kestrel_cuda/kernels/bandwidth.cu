// How fast the card reads its memory: every word once, sixteen bytes a load. The ceiling that speeds are compared with.

#include "common.cuh"

// Reads num_vectors 16-byte vectors num_passes times over; `out` is written only if the words combine to a value no buffer
// holds, so that the loads cannot be dropped. More than one pass, so that what a launch takes to begin and to end weighs
// little; the vectors are more than the second-level cache holds. Grid: a multiple of the multiprocessors.
extern "C" __global__ void __launch_bounds__(512)
read_vectors(const void* data, u32* out, i64 num_vectors, int num_passes) {
    const uint4* vectors = (const uint4*)data;
    const i64 stride = (i64)gridDim.x * blockDim.x, first = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    u32 combined = 0;
    for (int pass = 0; pass < num_passes; ++pass) {
        i64 i = first;
        for (; i + 7 * stride < num_vectors; i += 8 * stride) {
            uint4 v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = __ldcs(vectors + i + j * stride);
#pragma unroll
            for (int j = 0; j < 8; ++j) combined |= v[j].x | v[j].y | v[j].z | v[j].w;
        }
        for (; i < num_vectors; i += stride) combined |= __ldcs(&vectors[i].x);
    }
    if (combined == 0xdeadbeefu) *out = combined;
}
