// Linears over packed weights for two to four rows, and the float linear for any number of rows; decode.cu has one row.
//
// The order of every sum, here and in gemm.cu: inside a piece of 128 inputs the terms run over groups of 32 in
// ascending order, acc = fma(float(dot), x_scale * w_scale, acc) with an exact int32 dot; pieces are added in
// ascending order. It depends on the number of inputs alone, so a row's result has the same bits in every kernel.
//
// Block: up to 16 warps over 32 output columns; a lane owns a column, a warp a piece. Weights of a piece are loaded
// to registers at once, so a warp has 4 KB (int8) in flight. Grid: (ceil(n_padded / 32), ceil(m / kRows)).

#include "common.cuh"

constexpr int kMaxWarps = 16;

// Add one round of piece sums, held as partial[warp][row][lane], to the totals in ascending order; warp r keeps row r.
template <int kRows>
__device__ inline float add_pieces(float total, const float (*partial)[kRows][kWarp], int num_pieces) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (warp < kRows)
        for (int p = 0; p < num_pieces; ++p) total = add_rn(total, partial[p][warp][lane]);
    return total;
}

// The loop over rounds of pieces, shared by every weight kind: `piece_sums` fills acc[kRows] for one piece.
template <int kRows, typename PieceSums>
__device__ inline void sum_pieces(float* out_mn, int m, int n, int ldo, int k_padded, int first_row, int residual,
                                  PieceSums piece_sums) {
    __shared__ float partial[2][kMaxWarps][kRows][kWarp];
    const int num_warps = blockDim.x / kWarp;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int num_pieces = (k_padded + kPiece - 1) / kPiece;
    float total = 0.0f;
    int buffer = 0;
    for (int round = 0; round < num_pieces; round += num_warps, buffer ^= 1) {
        float acc[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) acc[r] = 0.0f;
        if (round + warp < num_pieces) piece_sums(round + warp, acc);
#pragma unroll
        for (int r = 0; r < kRows; ++r) partial[buffer][warp][r][lane] = acc[r];
        __syncthreads();
        total = add_pieces<kRows>(total, partial[buffer], min(num_warps, num_pieces - round));
    }
    const int column = blockIdx.x * kWarp + lane;
    const int row = first_row + warp;
    if (warp < kRows && row < m && column < n) {
        float* out = out_mn + (i64)row * ldo + column;
        *out = residual ? add_rn(*out, total) : total;
    }
}

template <typename Weights, int kRows>
__device__ inline void linear_rows(const u32* x_codes, const float* x_scales, const u32* codes_kn,
                                   const u16* scales_gn, float* out_mn, int m, int n, int n_padded, int k_padded,
                                   int groups_per_scale, int ldo, int residual) {
    const int column = min(blockIdx.x * kWarp + threadIdx.x % kWarp, n_padded - 1);
    const int first_row = blockIdx.y * kRows;
    const int num_groups = k_padded / kGroup;
    sum_pieces<kRows>(out_mn, m, n, ldo, k_padded, first_row, residual, [&](int piece, float* acc) {
        constexpr int kWords = Weights::kWordsPerGroup;
        const int first_group = piece * kGroupsPerPiece;
        const int groups = min(kGroupsPerPiece, num_groups - first_group);
        u32 w[kGroupsPerPiece][kWords];
        float w_scale[kGroupsPerPiece];
#pragma unroll
        for (int g = 0; g < kGroupsPerPiece; ++g) {
            if (g >= groups) break;
#pragma unroll
            for (int i = 0; i < kWords; ++i)
                w[g][i] = __ldg(codes_kn + (i64)((first_group + g) * kWords + i) * n_padded + column);
            w_scale[g] = half_to_float(__ldg(scales_gn + (i64)((first_group + g) / groups_per_scale) * n_padded + column));
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = min(first_row + r, m - 1);
            const uint4* x = (const uint4*)(x_codes + (i64)row * (k_padded / 4));
            const float* xs = x_scales + (i64)row * num_groups;
#pragma unroll
            for (int g = 0; g < kGroupsPerPiece; ++g) {
                if (g >= groups) break;
                const uint4 low = x[(first_group + g) * 2], high = x[(first_group + g) * 2 + 1];
                const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                const float scale = mul_rn(xs[first_group + g], w_scale[g]);
                acc[r] = fma_rn((float)Weights::dot(w[g], words), scale, acc[r]);
            }
        }
    });
}

#define LINEAR_ROWS(NAME, WEIGHTS, ROWS)                                                                             \
    extern "C" __global__ void __launch_bounds__(kMaxWarps * kWarp, 1)                                               \
    NAME(const u32* x_codes, const float* x_scales, const u32* codes_kn, const u16* scales_gn, float* out_mn, int m, \
         int n, int n_padded, int k_padded, int groups_per_scale, int ldo, int residual) {                           \
        linear_rows<WEIGHTS, ROWS>(x_codes, x_scales, codes_kn, scales_gn, out_mn, m, n, n_padded, k_padded,         \
                                   groups_per_scale, ldo, residual);                                                 \
    }

LINEAR_ROWS(linear_rows2_int8, Int8Weights, 2)
LINEAR_ROWS(linear_rows4_int8, Int8Weights, 4)
LINEAR_ROWS(linear_rows2_int4, Int4Weights, 2)
LINEAR_ROWS(linear_rows4_int4, Int4Weights, 4)

// out[row][column] = sum_k x[row][k] * w[k][column], k ascending by fma inside a piece. weight_kind 0 bf16, 1 f16, 2 f32.
// The one float linear, for every number of rows. Grid: (ceil(n_padded / 32), ceil(m / 8)).
constexpr int kFloatRows = 8;

extern "C" __global__ void __launch_bounds__(kMaxWarps * kWarp, 1)
linear_float(const float* x_mk, const void* values_kn, float* out_mn, int weight_kind, int m, int n, int n_padded,
             int k, int ldo, int residual) {
    const int column = min(blockIdx.x * kWarp + threadIdx.x % kWarp, n_padded - 1);
    const int first_row = blockIdx.y * kFloatRows;
    sum_pieces<kFloatRows>(out_mn, m, n, ldo, k, first_row, residual, [&](int piece, float* acc) {
        const int end = min((piece + 1) * kPiece, k);
#pragma unroll 4
        for (int kk = piece * kPiece; kk < end; ++kk) {
            const i64 at = (i64)kk * n_padded + column;
            float w;
            if (weight_kind == 0) w = bf16_to_float(__ldg((const u16*)values_kn + at));
            else if (weight_kind == 1) w = half_to_float(__ldg((const u16*)values_kn + at));
            else w = __ldg((const float*)values_kn + at);
#pragma unroll
            for (int r = 0; r < kFloatRows; ++r)
                acc[r] = fma_rn(__ldg(x_mk + (i64)min(first_row + r, m - 1) * k + kk), w, acc[r]);
        }
    });
}
