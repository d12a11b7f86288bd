// Strips [n][k] to the packed layout [k][ld], written at a column offset so that several weights fill disjoint
// column ranges of one fused buffer. Tiles of 32 x 32 in shared memory, one pad column against bank conflicts.
// Grid: (ceil(columns_in / 32), ceil(n / 32)); block (32, 8), four rows a thread.

#include "common.cuh"

constexpr int kTile = 32;
constexpr int kTileRows = 8;

template <typename In, typename Out, typename Load, typename Store>
__device__ inline void transpose_tile(int n, int columns_in, Load load, Store store) {
    __shared__ Out tile[kTile][kTile + 1];
    const int column = blockIdx.x * kTile + threadIdx.x;
    for (int i = threadIdx.y; i < kTile; i += kTileRows) {
        const int row = blockIdx.y * kTile + i;
        if (row < n && column < columns_in) tile[i][threadIdx.x] = load(row, column);
    }
    __syncthreads();
    const int row = blockIdx.y * kTile + threadIdx.x;
    for (int i = threadIdx.y; i < kTile; i += kTileRows) {
        const int column_out = blockIdx.x * kTile + i;
        if (row < n && column_out < columns_in) store(column_out, row, tile[threadIdx.x][i]);
    }
}

// in_nk [n][k_words]: int8 codes four to a word, or float32 values -> out_kn [k_words][ld].
extern "C" __global__ void __launch_bounds__(256)
transpose_words(const u32* in_nk, u32* out_kn, int n, int k_words, int ld, int col_offset) {
    transpose_tile<u32, u32>(
        n, k_words, [&](int row, int column) { return in_nk[(i64)row * k_words + column]; },
        [&](int k, int row, u32 value) { out_kn[(i64)k * ld + col_offset + row] = value; });
}

// in_nk [n][k] of 16-bit floats -> out_kn [k][ld].
extern "C" __global__ void __launch_bounds__(256)
transpose_halves(const u16* in_nk, u16* out_kn, int n, int k, int ld, int col_offset) {
    transpose_tile<u16, u16>(
        n, k, [&](int row, int column) { return in_nk[(i64)row * k + column]; },
        [&](int kk, int row, u16 value) { out_kn[(i64)kk * ld + col_offset + row] = value; });
}

// in_nk [n][2 * k_words] int8 codes in [-8, 7], four to a word -> out_kn [k_words][ld], eight to a word: the first
// four in the low nibbles, the next four in the high ones.
extern "C" __global__ void __launch_bounds__(256)
transpose_int4(const u32* in_nk, u32* out_kn, int n, int k_words, int ld, int col_offset) {
    transpose_tile<u32, u32>(
        n, k_words,
        [&](int row, int column) {
            const u32* pair = in_nk + ((i64)row * k_words + column) * 2;
            return (pair[0] & 0x0f0f0f0fu) | ((pair[1] & 0x0f0f0f0fu) << 4);
        },
        [&](int k, int row, u32 value) { out_kn[(i64)k * ld + col_offset + row] = value; });
}

// scales_ng [n][num_groups] float32 -> out_gn [num_groups][ld] float16; lossless, they are float16 values.
extern "C" __global__ void __launch_bounds__(256)
transpose_scales(const float* scales_ng, u16* out_gn, int n, int num_groups, int ld, int col_offset) {
    transpose_tile<float, u16>(
        n, num_groups,
        [&](int row, int column) { return float_to_half(scales_ng[(i64)row * num_groups + column]); },
        [&](int g, int row, u16 value) { out_gn[(i64)g * ld + col_offset + row] = value; });
}
