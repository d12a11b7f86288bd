// One row through a linear, with the step before it and the step after it in the same kernel (decode).
//
// The sums are those of gemv.cu to the bit: exact int32 dots of groups of 32, pieces of 128 inputs accumulated in
// ascending order, pieces added in ascending order; norms and activation codes as in norm.cu and pointwise.cu.
//
// A block owns sets of 16 columns; a warp takes every num_warps-th piece of them. The lower half of a warp takes the
// lower two groups of a piece, the upper half carries the sum on through the upper two. Weights of the next piece are on
// their way while one is summed up, and those of the first are asked for before the kernel waits for the ones before it,
// so the memory never rests between two linears.

#include "common.cuh"

constexpr int kDecodeThreads = kNormThreads;
constexpr int kColumns = 16;           // of a set
constexpr int kGroupsPerLane = kGroupsPerPiece / 2;
#if __CUDA_ARCH__ >= 1000
constexpr int kBlocksPerMultiprocessor = 1;    // where the compiler would spill for the second
#else
constexpr int kBlocksPerMultiprocessor = 2;
#endif

// Packed weights of one linear: codes_kn [k / 4 or 8][n_padded], scales_gn [groups][n_padded].
struct Matrix {
    const u32* codes_kn;
    const u16* scales_gn;
    int n, n_padded, num_groups, groups_per_scale;

    __device__ int num_pieces() const { return (num_groups + kGroupsPerPiece - 1) / kGroupsPerPiece; }
};

// What one lane holds of a piece: the words and scales of one column, two groups.
template <typename Weights>
struct HalfPiece {
    u32 words[kGroupsPerLane][Weights::kWordsPerGroup];
    u16 scales[kGroupsPerLane];

    __device__ void load(const Matrix& m, int piece, int column) {
        const int first_group = piece * kGroupsPerPiece + threadIdx.x % kWarp / kColumns * kGroupsPerLane;
#pragma unroll
        for (int g = 0; g < kGroupsPerLane; ++g) {
            const int group = first_group + g;
            const bool valid = group < m.num_groups && column < m.n_padded;
            // 32 bits hold every offset: a matrix of 2^32 words would be 16 GiB.
            const u32* from = m.codes_kn + (u32)(group * Weights::kWordsPerGroup * m.n_padded + column);
#pragma unroll
            for (int i = 0; i < Weights::kWordsPerGroup; ++i) words[g][i] = valid ? __ldcs(from + (u32)(i * m.n_padded)) : 0u;
            scales[g] = valid ? __ldcs(m.scales_gn + (u32)(group / m.groups_per_scale * m.n_padded + column)) : (u16)0;
        }
    }

    // The piece's sum for this lane's column, complete in the upper half of the warp.
    __device__ float sum(const u32* x_codes, const float* x_scales, int piece, int num_groups) const {
        const bool upper = threadIdx.x % kWarp >= kColumns;
        const int first_group = piece * kGroupsPerPiece + upper * kGroupsPerLane;
        float terms[kGroupsPerLane], factors[kGroupsPerLane];
#pragma unroll
        for (int g = 0; g < kGroupsPerLane; ++g) {
            // Past the last group the weights are zero; reading group 0 again keeps the addresses good.
            const int group = first_group + g < num_groups ? first_group + g : 0;
            const uint4* x = (const uint4*)(x_codes + group * 8);
            const uint4 low = x[0], high = x[1];
            const u32 x_words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            terms[g] = (float)Weights::dot(words[g], x_words);
            factors[g] = mul_rn(x_scales[group], half_to_float(scales[g]));
        }
        float acc = 0.0f;
#pragma unroll
        for (int g = 0; g < kGroupsPerLane; ++g) acc = fma_rn(terms[g], factors[g], acc);
        float carried = __shfl_sync(0xffffffffu, acc, threadIdx.x % kColumns);
#pragma unroll
        for (int g = 0; g < kGroupsPerLane; ++g)
            if (first_group + g < num_groups) carried = fma_rn(terms[g], factors[g], carried);
        return carried;
    }
};

// The work of one warp, piece by piece and set by set. Set s starts at `column`, plus 16 if s is odd, plus `upper_half`
// from set 2 on.
template <int kSets>
struct Item {
    int piece, set;

    __device__ Item next() const {
        const int next_set = (set + 1) % kSets;
        return {next_set == 0 ? piece + (int)blockDim.x / kWarp : piece, next_set};
    }

    __device__ int column(int first, int upper_half) const { return first + set % 2 * kColumns + set / 2 * upper_half; }
};

// Every piece of this warp for the block's sets of columns: piece sums go to sums[set][piece][kColumns]. `first` is the
// warp's first item, loaded before. Two buffers in turn, never copied: a copy would wait for what is on its way.
template <typename Weights, int kSets>
__device__ inline void sum_sets(const Matrix& m, HalfPiece<Weights>& first, int column, int upper_half, const u32* x_codes,
                                const float* x_scales, float* sums) {
    const int num_pieces = m.num_pieces(), lane = threadIdx.x % kWarp;
    auto consume = [&](const HalfPiece<Weights>& half_piece, Item<kSets> item) {
        const float acc = half_piece.sum(x_codes, x_scales, item.piece, m.num_groups);
        if (lane >= kColumns) sums[(item.set * num_pieces + item.piece) * kColumns + lane - kColumns] = acc;
    };
    HalfPiece<Weights> second;
    Item<kSets> item = {(int)threadIdx.x / kWarp, 0};
#pragma unroll 1
    while (item.piece < num_pieces) {
        const Item<kSets> next = item.next();
        if (next.piece < num_pieces) second.load(m, next.piece, next.column(column, upper_half));
        consume(first, item);
        if (next.piece >= num_pieces) break;
        item = next.next();
        if (item.piece < num_pieces) first.load(m, item.piece, item.column(column, upper_half));
        consume(second, next);
    }
}

__device__ inline float add_pieces(const float* sums, int set, int num_pieces, int column) {
    float total = 0.0f;
    for (int piece = 0; piece < num_pieces; ++piece) total = add_rn(total, sums[(set * num_pieces + piece) * kColumns + column]);
    return total;
}

// RMSNorm of h_k and its activation codes into shared memory, by every block for itself: norm.cu's sum, and
// quantize_group for four groups of a warp at a time, so that the divisions are done once for the four.
// Needs kNormThreads threads; weight_k and h_k are [k] floats of shared memory, the first already filled.
__device__ inline void norm_to_shared(const float* from_k, const float* weight_k, float* h_k, int k, float eps, i8* codes,
                                      float* scales) {
    __shared__ float scratch[kNormThreads / kWarp];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < k; i += kNormThreads) {
        const float x = from_k[i];
        h_k[i] = x;
        sum = fma_rn(x, x, sum);
    }
    sum = block_sum<kNormThreads / kWarp>(sum, scratch);
    const float rstd = __frsqrt_rn(add_rn(div_rn(sum, (float)k), eps));
    const int num_groups = (k + kGroup - 1) / kGroup;
    constexpr int kStep = kNormThreads / kWarp, kAtOnce = 4;
    for (int first = warp; first < num_groups; first += kStep * kAtOnce) {
        float y[kAtOnce], scale = 0.0f, inverse = 0.0f;
        u32 amax_bits = 0;
#pragma unroll
        for (int g = 0; g < kAtOnce; ++g) {
            const int i = (first + g * kStep) * kGroup + lane;
            y[g] = i < k ? mul_rn(weight_k[i], mul_rn(h_k[i], rstd)) : 0.0f;
            const u32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(y[g]) & 0x7fffffffu);
            if (lane == g) amax_bits = bits;
        }
        scale = div_rn(__uint_as_float(amax_bits), 127.0f);
        if (scale < kSmallestScale) scale = 0.0f;
        if (scale != 0.0f) inverse = div_rn(1.0f, scale);
#pragma unroll
        for (int g = 0; g < kAtOnce; ++g) {
            const int group = first + g * kStep;
            const float inverse_g = __shfl_sync(0xffffffffu, inverse, g);
            if (group >= num_groups) break;
            codes[group * kGroup + lane] = (i8)max(-127, min(127, __float2int_rn(mul_rn(y[g], inverse_g))));
            if (lane == g) scales[group] = scale;
        }
    }
    __syncthreads();
}

// Dynamic shared memory of a block: piece sums of its sets; where it makes its own activation, the codes and scales of
// that, the norm's weight and the row it comes from.
struct Shared {
    float* sums;
    i8* codes;
    float *scales, *weight, *h;

    __device__ Shared(unsigned char* bytes, int num_sets, const Matrix& m) {
        sums = (float*)bytes;
        codes = (i8*)(sums + num_sets * m.num_pieces() * kColumns);
        scales = (float*)(codes + m.num_groups * kGroup);
        weight = scales + m.num_groups;
        h = weight + m.num_groups * kGroup;
    }

    __device__ void load_weight(const float* weight_k, int k) {
#pragma unroll 4
        for (int i = threadIdx.x; i < k; i += kNormThreads) weight[i] = weight_k[i];
    }
};

// out_n [n] = norm(h_k) @ weights. Grid: ceil(n_padded / 16).
template <typename Weights>
__device__ inline void norm_linear(const float* h_k, const float* weight_k, const Matrix& m, float* out_n, int k, float eps) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Shared shared(bytes, 1, m);
    const int first_column = blockIdx.x * kColumns;
    const int column = first_column + (int)threadIdx.x % kColumns;
    launch_dependents();
    HalfPiece<Weights> first;
    first.load(m, threadIdx.x / kWarp, column);
    shared.load_weight(weight_k, k);
    wait_for_previous();
    norm_to_shared(h_k, shared.weight, shared.h, k, eps, shared.codes, shared.scales);
    sum_sets<Weights, 1>(m, first, column, 0, (const u32*)shared.codes, shared.scales, shared.sums);
    __syncthreads();
    if (threadIdx.x < kColumns && first_column + threadIdx.x < m.n)
        out_n[first_column + threadIdx.x] = add_pieces(shared.sums, 0, m.num_pieces(), threadIdx.x);
}

// out_n [n] = x @ weights, or += where `add`, x given as codes and scales; kSets sets of neighbouring columns a block.
// Grid: ceil(n_padded / (16 * kSets)).
template <typename Weights, int kSets>
__device__ inline void linear_row(const u32* x_codes, const float* x_scales, const Matrix& m, float* out_n, int add) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const Shared shared(bytes, kSets, m);
    const int first_column = blockIdx.x * kColumns * kSets;
    const int column = first_column + (int)threadIdx.x % kColumns;
    launch_dependents();
    HalfPiece<Weights> first;
    first.load(m, threadIdx.x / kWarp, column);
    wait_for_previous();
    sum_sets<Weights, kSets>(m, first, column, 2 * kColumns, x_codes, x_scales, shared.sums);
    __syncthreads();
    if (threadIdx.x < kColumns * kSets && first_column + threadIdx.x < m.n) {
        float* out = out_n + first_column + threadIdx.x;
        const float total = add_pieces(shared.sums, threadIdx.x / kColumns, m.num_pieces(), threadIdx.x % kColumns);
        *out = add ? add_rn(*out, total) : total;
    }
}

// y_codes [half], y_scales = silu(gate) * up of norm(h_k) @ weights, whose first `half` columns are gate and the next
// `half` up; half divides by 32. A block owns 32 gate columns and their 32 up columns: one activation group.
// Grid: half / 32.
template <typename Weights>
__device__ inline void norm_gate_up(const float* h_k, const float* weight_k, const Matrix& m, i8* y_codes, float* y_scales,
                                    int half, int k, float eps) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Shared shared(bytes, 4, m);
    const int column = blockIdx.x * kGroup + threadIdx.x % kColumns;
    launch_dependents();
    HalfPiece<Weights> first;
    first.load(m, threadIdx.x / kWarp, column);
    shared.load_weight(weight_k, k);
    wait_for_previous();
    norm_to_shared(h_k, shared.weight, shared.h, k, eps, shared.codes, shared.scales);
    sum_sets<Weights, 4>(m, first, column, half, (const u32*)shared.codes, shared.scales, shared.sums);
    __syncthreads();
    if (threadIdx.x < kGroup) {
        const int set = threadIdx.x / kColumns, column = threadIdx.x % kColumns, num_pieces = m.num_pieces();
        const float y = silu_mul(add_pieces(shared.sums, set, num_pieces, column),
                                 add_pieces(shared.sums, set + 2, num_pieces, column));
        quantize_group(y, y_codes + blockIdx.x * kGroup, y_scales + blockIdx.x);
    }
}

#define DECODE(WEIGHTS, SUFFIX)                                                                                      \
    extern "C" __global__ void __launch_bounds__(kDecodeThreads, kBlocksPerMultiprocessor)                           \
    norm_linear_##SUFFIX(const float* h_k, const float* weight_k, const u32* codes_kn, const u16* scales_gn,         \
                         float* out_n, int n, int n_padded, int num_groups, int groups_per_scale, int k, float eps) { \
        const Matrix m = {codes_kn, scales_gn, n, n_padded, num_groups, groups_per_scale};                           \
        norm_linear<WEIGHTS>(h_k, weight_k, m, out_n, k, eps);                                                       \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kDecodeThreads, kBlocksPerMultiprocessor)                           \
    linear_row_##SUFFIX(const u32* x_codes, const float* x_scales, const u32* codes_kn, const u16* scales_gn,        \
                    float* out_n, int n, int n_padded, int num_groups, int groups_per_scale, int add) {            \
        const Matrix m = {codes_kn, scales_gn, n, n_padded, num_groups, groups_per_scale};                           \
        linear_row<WEIGHTS, 1>(x_codes, x_scales, m, out_n, add);                                                   \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kDecodeThreads, kBlocksPerMultiprocessor)                           \
    linear_wide_##SUFFIX(const u32* x_codes, const float* x_scales, const u32* codes_kn, const u16* scales_gn,       \
                    float* out_n, int n, int n_padded, int num_groups, int groups_per_scale, int add) {            \
        const Matrix m = {codes_kn, scales_gn, n, n_padded, num_groups, groups_per_scale};                           \
        linear_row<WEIGHTS, 4>(x_codes, x_scales, m, out_n, add);                                                   \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kDecodeThreads, kBlocksPerMultiprocessor)                           \
    norm_gate_up_##SUFFIX(const float* h_k, const float* weight_k, const u32* codes_kn, const u16* scales_gn,        \
                          i8* y_codes, float* y_scales, int half, int n_padded, int num_groups, int groups_per_scale, \
                          int k, float eps) {                                                                        \
        const Matrix m = {codes_kn, scales_gn, 2 * half, n_padded, num_groups, groups_per_scale};                    \
        norm_gate_up<WEIGHTS>(h_k, weight_k, m, y_codes, y_scales, half, k, eps);                                    \
    }

DECODE(Int8Weights, int8)
DECODE(Int4Weights, int4)
