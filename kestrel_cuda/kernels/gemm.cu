// Linears over packed weights for many rows (prefill), on the integer tensor cores.
//
// The sums are those of gemv.cu to the bit: an mma gives the exact dots of one group of 32 inputs, a piece of 128 is
// accumulated in ascending order, pieces are added in ascending order. A row does not depend on the others.
//
// A block owns a tile of rows x columns and goes through the pieces, each in a stage of shared memory, filled by
// cp.async while an earlier one is summed up. Grid: (ceil(n_padded / columns), ceil(m / rows)). Small tiles are for grids of
// wide ones that would leave multiprocessors without work.
//
// The kernel is bound by the instructions it issues: three for the float sum of an output and group, the rest is spread
// over as many outputs as the registers hold. A warp has kWarpM rows x 32 columns, weights are the mma's first operand
// (16 columns), activations its second (8 rows). What the mma calls its rows and columns is chosen so that a lane
// (quad, j) reads neighbours at once, into the registers that the mma wants in a row:
//   columns: rows quad and quad + 8 of mma t are columns 16t + 2 * quad and the next;
//   rows: of 16 rows the lane has 4j .. 4j + 3, two in each of two mma. A stage has the codes in the mma's order
//         (`row_at`), the scales in that of the rows.
// Inside a group the inputs may be fed in any order that weights and activations share. int8: words j and j + 4, as
// ldmatrix deals them; int4: inputs 8j .. 8j + 7, which is one word of weights and two of activations.

#include "common.cuh"

constexpr int kWarpN = 32;
constexpr int kMmas = kWarpN / 16;         // that a warp's columns take
constexpr int kLaneN = 2 * kMmas;          // columns of a lane
constexpr int kWideM = 128;
constexpr int kWideN = 128;
constexpr int kWideWarpM = 64;
constexpr int kWideThreads = kWideM / kWideWarpM * (kWideN / kWarpN) * kWarp;
constexpr int kSmallM = 64;
constexpr int kSmallN = 64;
constexpr int kSmallWarpM = 32;
constexpr int kSmallThreads = kSmallM / kSmallWarpM * (kSmallN / kWarpN) * kWarp;
constexpr int kMaxStages = 3;              // two where a block may not have the memory
// The bits of 1.5 * 2^23. An integer below 2^22 added to them is added to the value, exactly: a float for one addition.
constexpr u32 kOffsetBits = 0x4b400000u;
constexpr float kOffset = 12582912.0f;

__device__ inline void load_matrices(u32 x[4], const void* shared) {
    const u32 at = (u32)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at));
}

// dots [2 columns][2 rows] on top of kOffsetBits; w [2 halves of the inputs][2 columns], x [2 halves of the inputs].
__device__ inline void mma_m16n8k32(u32 dots[4], const u32 w[4], const u32 x[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(dots[0]), "=r"(dots[1]), "=r"(dots[2]), "=r"(dots[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x[0]), "r"(x[1]), "r"(kOffsetBits));
}

// The float of a dot, exact. Nibbles at the top of their bytes make that of int4 weights sixteen times too large.
template <int kBits>
__device__ inline float dot_to_float(u32 dot) {
    if constexpr (kBits == 8) return sub_rn(__uint_as_float(dot), kOffset);
    else return fma_rn(__uint_as_float(dot), 1.0f / 16, -kOffset / 16);
}

template <int kBits_, int kTileM_, int kTileN_, int kWarpM_>
struct Tile {
    static constexpr int kBits = kBits_, kTileM = kTileM_, kTileN = kTileN_, kWarpM = kWarpM_;
    static constexpr int kThreads = kTileM / kWarpM * (kTileN / kWarpN) * kWarp;
    static constexpr int kWords = kBits == 8 ? 8 : 4;    // of weights a group and column
    static constexpr int kLaneM = kWarpM / 4;            // rows of a lane

    // Lengths of rows that keep the reads free of bank conflicts.
    static constexpr int kRowWords = kPiece / 4 + (kBits == 8 ? 4 : 8);
    static constexpr int kColumnWords = kTileN + 8;
    static constexpr int kScaleWords = kTileM + 8;

    struct Stage {
        u32 x_codes[kTileM][kRowWords];
        u32 codes_kn[kGroupsPerPiece * kWords][kColumnWords];
        float x_scales_gm[kGroupsPerPiece][kScaleWords];
        u32 scale_pairs_gn[kGroupsPerPiece][kTileN / 2];
    };

    __device__ static int warp_row(int thread) { return thread / kWarp / (kTileN / kWarpN) * kWarpM; }
    __device__ static int warp_column(int thread) { return thread / kWarp % (kTileN / kWarpN) * kWarpN; }

    // Rows in an order in which two neighbours are written to different banks.
    __device__ static int copied_row(int i) {
        if constexpr (kBits == 8) return i / 16 * 16 + i % 2 * 8 + i % 16 / 2;
        else return i / 8 * 8 + i % 2 * 4 + i % 8 / 2;
    }

    // Where a stage has the codes of a row, and the scales of a pair of columns.
    __device__ static int row_at(int row) { return row / 16 * 16 + row / 2 % 2 * 8 + row % 16 / 4 * 2 + row % 2; }
    __device__ static int pair_at(int pair) { return pair / 16 * 16 + pair % 8 * 2 + pair / 8 % 2; }
};

// The same place in a later stage.
template <typename T>
__device__ inline T* ahead(T* in_first_stage, u32 stage_bytes) { return (T*)((char*)in_first_stage + stage_bytes); }

// The lane's own pointer; one that is not from a shuffle would be computed again for every piece.
template <typename T>
__device__ inline T* kept(T* shared) {
    const u32 at = __shfl_sync(0xffffffffu, (u32)__cvta_generic_to_shared(shared), threadIdx.x % kWarp);
    return (T*)__cvta_shared_to_generic(at);
}

// threadIdx.x where it is asked for, so that what is derived from it holds no register before.
__device__ inline int thread_anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// What a thread copies of each piece: from where, relative to the piece's first input, and to where in the first stage.
// Columns past the last are copies of the last, rows past it whatever lay there, and summed up for nothing: one row copied
// for all of them would keep its place in the second-level cache busier than all weights do the rest.
template <typename Tile>
struct Copies {
    using Stage = typename Tile::Stage;
    static constexpr int kThreads = Tile::kThreads;
    static constexpr int kColumnChunks = Tile::kTileN / 4, kPairs = Tile::kTileN / 2;
    static constexpr int kRowStep = kThreads / kGroupsPerPiece, kWeightStep = kThreads / kColumnChunks;
    static constexpr int kRows = Tile::kTileM / kRowStep, kWeights = kGroupsPerPiece * Tile::kWords / kWeightStep;
    static_assert(kRowStep % 16 == 0 && kWeightStep * kColumnChunks == kThreads && kGroupsPerPiece * kPairs == kThreads,
                  "a thread has the same column and group in every copy");

    const u32* x_codes;
    const float* x_scales;
    const u32* codes_kn;
    const u16* scales_gn;
    int n_padded, log2_groups_per_scale, num_rows;
    // 32 bits hold every offset: a matrix of 2^32 words would be 16 GiB.
    u32 row_from[kRows], row_scale_from[kRows], scale_from;
    u32 *x_codes_to, *codes_to, *scale_pair_to;
    float* x_scale_to;

    __device__ void start(Stage& stage, int m, int num_groups) {
        const int thread = threadIdx.x, first_row = blockIdx.y * Tile::kTileM, first_column = blockIdx.x * Tile::kTileN;
        const int row = Tile::copied_row(thread / kGroupsPerPiece), group = thread % kGroupsPerPiece;
        num_rows = (m - first_row - row + kRowStep - 1) / kRowStep;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const u32 from = (u32)(first_row + row + i * kRowStep) * num_groups;
            row_from[i] = from * (kGroup / 4) + group * 4;
            row_scale_from[i] = from + group;
        }
        x_codes_to = kept(&stage.x_codes[Tile::row_at(row)][group * 4]);
        x_scale_to = kept(&stage.x_scales_gm[group][row]);

        const int weight_row = thread / kColumnChunks, column = thread % kColumnChunks * 4;
        codes_kn += (i64)weight_row * n_padded + min(first_column + column, n_padded - 4);
        codes_to = kept(&stage.codes_kn[weight_row][column]);

        scale_from = min(first_column + thread % kPairs * 2, n_padded - 2);
        scale_pair_to = kept(&stage.scale_pairs_gn[thread / kPairs][Tile::pair_at(thread % kPairs)]);
    }

    // Copy the next piece. Where it is not whole, groups past the last become zeros, which add nothing.
    template <bool kWhole>
    __device__ void next(int groups, int num_groups, u32 stage_bytes) {
        const int thread = thread_anew();
        const int group = thread % kGroupsPerPiece;
        u32* const x_to = ahead(x_codes_to, stage_bytes);
        float* const x_scales_to = ahead(x_scale_to, stage_bytes);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (i >= num_rows) break;
            // A thread has every fourth 16 bytes of a row: neighbours share a sector.
#pragma unroll
            for (int half = 0; half < 2; ++half)
                copy_async_16(x_to + i * kRowStep * Tile::kRowWords + half * 16, x_codes + row_from[i] + half * 16,
                              kWhole || half * 2 + group / 2 < groups);
            copy_async_4(x_scales_to + i * kRowStep, x_scales + row_scale_from[i], kWhole || group < groups);
        }
        u32* const w_to = ahead(codes_to, stage_bytes);
#pragma unroll
        for (int i = 0; i < kWeights; ++i) {
            copy_async_16(w_to + i * kWeightStep * Tile::kColumnWords, codes_kn,
                          kWhole || (thread / kColumnChunks + i * kWeightStep) / Tile::kWords < groups);
            codes_kn += kWeightStep * n_padded;
        }
        const u32 scale_group = (u32)(num_groups - groups + threadIdx.x / kPairs) >> log2_groups_per_scale;
        copy_async_4(ahead(scale_pair_to, stage_bytes), scales_gn + (scale_group * n_padded + scale_from),
                     kWhole || thread / kPairs < groups);
        x_codes += kPiece / 4;
        x_scales += kGroupsPerPiece;
    }
};

// What a lane reads of each piece, in the first stage.
template <typename Tile>
struct Reads {
    static constexpr int kBits = Tile::kBits, kLaneM = Tile::kLaneM;
    const u32 *x_codes, *codes_kn, *scale_pairs_gn;
    const float* x_scales_gm;

    __device__ void start(const typename Tile::Stage& stage) {
        const int lane = threadIdx.x % kWarp, quad = lane / 4, j = lane % 4;
        const int warp_row = Tile::warp_row(threadIdx.x), warp_column = Tile::warp_column(threadIdx.x);
        int row = warp_row + quad, word = 2 * j;
        if constexpr (kBits == 8) row = warp_row + lane / 16 * 8 + lane % 8, word = lane / 8 % 2 * 4;
        x_codes = kept(&stage.x_codes[row][word]);
        codes_kn = kept(&stage.codes_kn[j][warp_column + 2 * quad]);
        scale_pairs_gn = kept(&stage.scale_pairs_gn[0][warp_column / 2 + 2 * quad]);
        x_scales_gm = kept(&stage.x_scales_gm[0][warp_row + 4 * j]);
    }

    // Add group g of a piece to acc, or set acc to group 0, for this lane's rows and columns.
    template <int g>
    __device__ void sum_group(u32 stage_bytes, float acc[kLaneM][kLaneN]) const {
        const u32* const x_from = ahead(x_codes, stage_bytes) + g * (kGroup / 4);
        const u32* const w_from = ahead(codes_kn, stage_bytes) + g * Tile::kWords * Tile::kColumnWords;
        const float* const x_scales_from = ahead(x_scales_gm, stage_bytes) + g * Tile::kScaleWords;
        u32 w[kMmas][4];
#pragma unroll
        for (int t = 0; t < kMmas; ++t) {
            const uint2 low = *(const uint2*)(w_from + t * 16);
            if constexpr (kBits == 8) {
                const uint2 high = *(const uint2*)(w_from + 4 * Tile::kColumnWords + t * 16);
                w[t][0] = low.x, w[t][1] = low.y, w[t][2] = high.x, w[t][3] = high.y;
            } else {
                w[t][0] = (low.x << 4) & 0xf0f0f0f0u, w[t][1] = (low.y << 4) & 0xf0f0f0f0u;
                w[t][2] = low.x & 0xf0f0f0f0u, w[t][3] = low.y & 0xf0f0f0f0u;
            }
        }
        const uint2 pairs = *(const uint2*)(ahead(scale_pairs_gn, stage_bytes) + g * Tile::kTileN / 2);
        const float ws[kLaneN] = {half_to_float((u16)pairs.x), half_to_float((u16)(pairs.x >> 16)),
                                  half_to_float((u16)pairs.y), half_to_float((u16)(pairs.y >> 16))};
#pragma unroll
        for (int i = 0; i < kLaneM; i += 4) {
            u32 x[4];
            const u32* const codes = x_from + i * 4 * Tile::kRowWords;
            if constexpr (kBits == 8) {
                load_matrices(x, codes);
            } else {
                const uint2 first = *(const uint2*)codes, second = *(const uint2*)(codes + 8 * Tile::kRowWords);
                x[0] = first.x, x[1] = first.y, x[2] = second.x, x[3] = second.y;
            }
            const float4 four = *(const float4*)(x_scales_from + i * 4);
            const float xs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int t = 0; t < kMmas; ++t) {
                    u32 dots[4];
                    mma_m16n8k32(dots, w[t], &x[2 * half]);
#pragma unroll
                    for (int d = 0; d < 4; ++d) {
                        const int row = 2 * half + d % 2, column = 2 * t + d / 2;
                        float& sum = acc[i + row][column];
                        sum = fma_rn(dot_to_float<kBits>(dots[d]), mul_rn(xs[row], ws[column]), g == 0 ? 0.0f : sum);
                    }
                }
        }
    }
};

// Set or add two neighbouring outputs, of which `valid` exist.
__device__ inline void put(float* out, float first, float second, int valid, bool aligned, int residual) {
    if (aligned && valid >= 2) {
        const float2 old = residual ? *(const float2*)out : float2{};
        *(float2*)out = residual ? float2{add_rn(old.x, first), add_rn(old.y, second)} : float2{first, second};
        return;
    }
    if (valid >= 1) out[0] = residual ? add_rn(out[0], first) : first;
    if (valid >= 2) out[1] = residual ? add_rn(out[1], second) : second;
}

// A block's way through the pieces: one is summed up while the next num_stages - 1 are copied.
template <typename Tile>
struct Pieces {
    static constexpr u32 kStageBytes = sizeof(typename Tile::Stage);
    Copies<Tile> copies;
    Reads<Tile> reads;
    int num_groups, num_stages, groups_to_copy;
    u32 current, free;
    float total[Tile::kLaneM][kLaneN];

    // Past the last piece nothing is copied, but a group is committed all the same: the waits count groups.
    template <bool kWhole>
    __device__ void copy_next() {
        if (kWhole || groups_to_copy > 0) copies.template next<kWhole>(groups_to_copy, num_groups, free);
        groups_to_copy -= kGroupsPerPiece;
        asm volatile("cp.async.commit_group;");
    }

    template <bool kWhole>
    __device__ void sum_next() {
        if (num_stages == kMaxStages) asm volatile("cp.async.wait_group 1;");
        else asm volatile("cp.async.wait_group 0;");
        __syncthreads();
        float acc[Tile::kLaneM][kLaneN];
        reads.template sum_group<0>(current, acc);
        copy_next<kWhole>();
        reads.template sum_group<1>(current, acc);
        reads.template sum_group<2>(current, acc);
        reads.template sum_group<3>(current, acc);
#pragma unroll
        for (int i = 0; i < Tile::kLaneM; ++i)
#pragma unroll
            for (int c = 0; c < kLaneN; ++c) total[i][c] = add_rn(total[i][c], acc[i][c]);
        free = current;
        current = current + kStageBytes == num_stages * kStageBytes ? 0 : current + kStageBytes;
    }

    __device__ void sum_all() {
#pragma unroll
        for (int i = 0; i < Tile::kLaneM; ++i)
#pragma unroll
            for (int c = 0; c < kLaneN; ++c) total[i][c] = 0.0f;
        groups_to_copy = num_groups, current = 0;
#pragma unroll 1
        for (free = 0; free < (num_stages - 1) * kStageBytes; free += kStageBytes) copy_next<false>();
#pragma unroll 1
        while (groups_to_copy >= kGroupsPerPiece) sum_next<true>();
        const int copied_ahead = (num_stages - 1) * kGroupsPerPiece;
#pragma unroll 1
        while (groups_to_copy + copied_ahead > 0) sum_next<false>();
    }
};

template <typename Tile>
__device__ inline void linear_tiles(const u32* x_codes, const float* x_scales, const u32* codes_kn,
                                    const u16* scales_gn, float* out_mn, int m, int n, int n_padded, int k_padded,
                                    int groups_per_scale, int ldo, int residual, int num_stages) {
    extern __shared__ __align__(16) unsigned char shared[];
    auto& first_stage = *(typename Tile::Stage*)shared;
    Pieces<Tile> pieces;
    pieces.num_groups = k_padded / kGroup, pieces.num_stages = num_stages;
    pieces.copies = {x_codes, x_scales, codes_kn, scales_gn, n_padded, 31 - __clz(groups_per_scale)};
    pieces.copies.start(first_stage, m, pieces.num_groups);
    pieces.reads.start(first_stage);
    pieces.sum_all();

    const int thread = thread_anew(), quad = thread % kWarp / 4, j = thread % 4;
    const int first_row = blockIdx.y * Tile::kTileM + Tile::warp_row(thread) + 4 * j;
    const int first_column = blockIdx.x * Tile::kTileN + Tile::warp_column(thread) + 2 * quad;
    const bool aligned = ldo % 2 == 0 && (u64)out_mn % 8 == 0;
#pragma unroll
    for (int i = 0; i < Tile::kLaneM; ++i)
#pragma unroll
        for (int c = 0; c < kLaneN; c += 2) {
            const int row = first_row + i / 4 * 16 + i % 4, column = first_column + c * 8;
            float* out = out_mn + (i64)row * ldo + column;
            if (row < m) put(out, pieces.total[i][c], pieces.total[i][c + 1], n - column, aligned, residual);
        }
}

// Dynamic shared memory: num_stages stages.
#define LINEAR_TILES(NAME, BITS, SIZE, BLOCKS)                                                                         \
    extern "C" __global__ void __launch_bounds__(k##SIZE##Threads, BLOCKS)                                             \
    NAME(const u32* x_codes, const float* x_scales, const u32* codes_kn, const u16* scales_gn, float* out_mn, int m,   \
         int n, int n_padded, int k_padded, int groups_per_scale, int ldo, int residual, int num_stages) {             \
        linear_tiles<Tile<BITS, k##SIZE##M, k##SIZE##N, k##SIZE##WarpM>>(x_codes, x_scales, codes_kn, scales_gn,       \
                                                                         out_mn, m, n, n_padded, k_padded,             \
                                                                         groups_per_scale, ldo, residual, num_stages); \
    }

LINEAR_TILES(linear_tiles_int8, 8, Wide, 1)
LINEAR_TILES(linear_tiles_int4, 4, Wide, 1)
LINEAR_TILES(linear_small_tiles_int8, 8, Small, 3)
LINEAR_TILES(linear_small_tiles_int4, 4, Small, 3)
