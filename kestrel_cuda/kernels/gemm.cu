// Linears over packed weights for many rows (prefill), on the integer tensor cores.
//
// The sums are those of gemv.cu to the bit: an mma gives the exact int32 dot of one group of 32 inputs, a piece of 128
// is accumulated in ascending order, pieces are added in ascending order. A row of an mma does not depend on the others.
//
// Tile: 64 rows x 128 columns a block of 8 warps (2 x 4), a warp 32 x 32; one piece of 128 inputs a stage, three stages
// in shared memory filled by cp.async. Grid: (ceil(n_padded / 128), ceil(m / 64)).
//
// Inside a group the inputs may be fed in any order that rows and columns share: lane j (of 4) takes inputs 8j..8j+7,
// which is one int4 word, two int8 words, and eight consecutive activation bytes.

#include "common.cuh"

constexpr int kTileM = 64;
constexpr int kTileN = 128;
constexpr int kThreads = 256;
constexpr int kStages = 3;
#if __CUDA_ARCH__ == 800
constexpr int kBlocksPerMultiprocessor = 1;    // where the compiler would spill for the second
#else
constexpr int kBlocksPerMultiprocessor = 2;
#endif
// Row strides in words that keep the fragment reads free of bank conflicts.
constexpr int kRowWords = kPiece / 4 + 8;
constexpr int kColumnWords = kTileN + 4;

__device__ inline void copy_async_16(void* shared, const void* global, bool valid) {
    const u32 at = (u32)__cvta_generic_to_shared(shared);
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(global), "r"(bytes));
}

__device__ inline void copy_async_8(void* shared, const void* global, bool valid) {
    const u32 at = (u32)__cvta_generic_to_shared(shared);
    const int bytes = valid ? 8 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(at), "l"(global), "r"(bytes));
}

__device__ inline void copy_async_4(void* shared, const void* global, bool valid) {
    const u32 at = (u32)__cvta_generic_to_shared(shared);
    const int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(global), "r"(bytes));
}

__device__ inline void mma_m16n8k32(int c[4], const u32 a[4], u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

template <int kWordsPerGroup>
struct Stage {
    u32 x[kTileM][kRowWords];
    u32 w[kGroupsPerPiece * kWordsPerGroup][kColumnWords];
    u16 w_scales[kGroupsPerPiece][kTileN];
    float x_scales[kTileM][kGroupsPerPiece];
};

template <int kBits>
__device__ inline void linear_tiles(const u32* x_codes, const float* x_scales, const u32* codes_kn,
                                    const u16* scales_gn, float* out_mn, int m, int n, int n_padded, int k_padded,
                                    int groups_per_scale, int ldo, int residual) {
    constexpr int kWords = kBits == 8 ? 8 : 4;
    constexpr int kWeightRows = kGroupsPerPiece * kWords;
    extern __shared__ __align__(16) unsigned char shared[];
    Stage<kWords>* stages = (Stage<kWords>*)shared;

    const int first_column = blockIdx.x * kTileN, first_row = blockIdx.y * kTileM;
    const int num_groups = k_padded / kGroup;
    const int num_pieces = (num_groups + kGroupsPerPiece - 1) / kGroupsPerPiece;

    // Past the last piece nothing is copied, but a group is committed all the same: the waits count groups.
    auto load = [&](int piece, Stage<kWords>& stage) {
        const int first_group = piece * kGroupsPerPiece;
        if (piece < num_pieces) {
#pragma unroll 1
            for (int i = threadIdx.x; i < kTileM * 8; i += kThreads) {
                const int row = i / 8, chunk = i % 8;
                const bool valid = first_row + row < m && first_group + chunk / 2 < num_groups;
                const u32* from = x_codes + (i64)(first_row + row) * (k_padded / 4) + first_group * 8 + chunk * 4;
                copy_async_16(&stage.x[row][chunk * 4], valid ? from : x_codes, valid);
            }
#pragma unroll 2
            for (int i = threadIdx.x; i < kWeightRows * (kTileN / 4); i += kThreads) {
                const int row = i / (kTileN / 4), column = i % (kTileN / 4) * 4;
                const bool valid = first_column + column < n_padded && first_group + row / kWords < num_groups;
                const u32* from = codes_kn + (i64)(first_group * kWords + row) * n_padded + first_column + column;
                copy_async_16(&stage.w[row][column], valid ? from : codes_kn, valid);
            }
            for (int i = threadIdx.x; i < kGroupsPerPiece * (kTileN / 4); i += kThreads) {
                const int g = i / (kTileN / 4), column = i % (kTileN / 4) * 4;
                const bool valid = first_column + column < n_padded && first_group + g < num_groups;
                const u16* from = scales_gn + (i64)((first_group + g) / groups_per_scale) * n_padded + first_column + column;
                copy_async_8(&stage.w_scales[g][column], valid ? from : scales_gn, valid);
            }
            for (int i = threadIdx.x; i < kTileM * kGroupsPerPiece; i += kThreads) {
                const int row = i / kGroupsPerPiece, g = i % kGroupsPerPiece;
                const bool valid = first_row + row < m && first_group + g < num_groups;
                const float* from = x_scales + (i64)(first_row + row) * num_groups + first_group + g;
                copy_async_4(&stage.x_scales[row][g], valid ? from : x_scales, valid);
            }
        }
        asm volatile("cp.async.commit_group;");
    };

    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int warp_row = warp / 4 * 32, warp_column = warp % 4 * 32;
    const int quad = lane / 4, j = lane % 4;
    float total[2][4][4];
#pragma unroll
    for (int a = 0; a < 2; ++a)
#pragma unroll
        for (int b = 0; b < 4; ++b)
#pragma unroll
            for (int c = 0; c < 4; ++c) total[a][b][c] = 0.0f;

    load(0, stages[0]);
    load(1, stages[1]);
    for (int piece = 0; piece < num_pieces; ++piece) {
        asm volatile("cp.async.wait_group 1;");
        __syncthreads();
        load(piece + 2, stages[(piece + 2) % kStages]);
        const Stage<kWords>& stage = stages[piece % kStages];
        const int groups = min(kGroupsPerPiece, num_groups - piece * kGroupsPerPiece);
        float acc[2][4][4];
#pragma unroll
        for (int a = 0; a < 2; ++a)
#pragma unroll
            for (int b = 0; b < 4; ++b)
#pragma unroll
                for (int c = 0; c < 4; ++c) acc[a][b][c] = 0.0f;
        // Not unrolled: two blocks on a multiprocessor hide more than loads moved ahead, and need the registers.
#pragma unroll 1
        for (int g = 0; g < groups; ++g) {
            u32 x[2][4];
            float xs[2][2];
#pragma unroll
            for (int a = 0; a < 2; ++a) {
                const int row = warp_row + a * 16 + quad;
                const uint2 top = *(const uint2*)&stage.x[row][g * 8 + 2 * j];
                const uint2 bottom = *(const uint2*)&stage.x[row + 8][g * 8 + 2 * j];
                x[a][0] = top.x, x[a][1] = bottom.x, x[a][2] = top.y, x[a][3] = bottom.y;
                xs[a][0] = stage.x_scales[row][g], xs[a][1] = stage.x_scales[row + 8][g];
            }
            // Two columns of mma at a time: enough in flight, and the registers for it.
#pragma unroll
            for (int pair = 0; pair < 4; pair += 2) {
                int dots[2][2][4];
                float ws[2][2];
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    const int column = warp_column + (pair + b) * 8;
                    u32 w0, w1;
                    if constexpr (kBits == 8) {
                        w0 = stage.w[g * kWords + 2 * j][column + quad];
                        w1 = stage.w[g * kWords + 2 * j + 1][column + quad];
                    } else {
                        const u32 word = stage.w[g * kWords + j][column + quad];
                        w0 = (word << 4) & 0xf0f0f0f0u;
                        w1 = word & 0xf0f0f0f0u;
                    }
                    const u32 scales = *(const u32*)&stage.w_scales[g][column + 2 * j];
                    ws[b][0] = half_to_float((u16)(scales & 0xffffu)), ws[b][1] = half_to_float((u16)(scales >> 16));
#pragma unroll
                    for (int a = 0; a < 2; ++a) mma_m16n8k32(dots[a][b], x[a], w0, w1);
                }
#pragma unroll
                for (int a = 0; a < 2; ++a)
#pragma unroll
                    for (int b = 0; b < 2; ++b)
#pragma unroll
                        for (int c = 0; c < 4; ++c) {
                            const int exact = kBits == 8 ? dots[a][b][c] : dots[a][b][c] >> 4;
                            float& sum = acc[a][pair + b][c];
                            sum = fma_rn((float)exact, mul_rn(xs[a][c / 2], ws[b][c % 2]), sum);
                        }
            }
        }
#pragma unroll
        for (int a = 0; a < 2; ++a)
#pragma unroll
            for (int b = 0; b < 4; ++b)
#pragma unroll
                for (int c = 0; c < 4; ++c) total[a][b][c] = add_rn(total[a][b][c], acc[a][b][c]);
    }

#pragma unroll
    for (int a = 0; a < 2; ++a)
#pragma unroll
        for (int b = 0; b < 4; ++b)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int row = first_row + warp_row + a * 16 + quad + c / 2 * 8;
                const int column = first_column + warp_column + b * 8 + 2 * j + c % 2;
                if (row < m && column < n) {
                    float* out = out_mn + (i64)row * ldo + column;
                    *out = residual ? add_rn(*out, total[a][b][c]) : total[a][b][c];
                }
            }
}

// Dynamic shared memory: kStages stages.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
linear_tiles_int8(const u32* x_codes, const float* x_scales, const u32* codes_kn, const u16* scales_gn, float* out_mn,
                  int m, int n, int n_padded, int k_padded, int groups_per_scale, int ldo, int residual) {
    linear_tiles<8>(x_codes, x_scales, codes_kn, scales_gn, out_mn, m, n, n_padded, k_padded, groups_per_scale, ldo,
                    residual);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
linear_tiles_int4(const u32* x_codes, const float* x_scales, const u32* codes_kn, const u16* scales_gn, float* out_mn,
                  int m, int n, int n_padded, int k_padded, int groups_per_scale, int ldo, int residual) {
    linear_tiles<4>(x_codes, x_scales, codes_kn, scales_gn, out_mn, m, n, n_padded, k_padded, groups_per_scale, ldo,
                    residual);
}
