// Linears over packed weights for many rows on Hopper's warpgroup mma. The sums are those of gemm.cu to the bit.
//
// A block owns 128 rows x 128 columns and goes through the pieces of 128 inputs. One warpgroup copies them into a ring of
// stages, two sum them up, each 64 columns of all rows. Weights are the mma's first operand, from registers: a lane's
// words are those of the packed matrix, four inputs of a column. Activations are its second, from shared memory.
//
// A warp issues one instruction to make an output's dot of 32 inputs a float, one for the product of scales, one for the
// sum; the mma of the next dots runs meanwhile. Only an mma's 32 rows are summed up over a piece at a time, so that the
// sums of the whole piece take no registers. Grid: (ceil(n_padded / 128), ceil(m / 128)).

#include "common.cuh"
#include "warpgroup.cuh"

constexpr int kTileM = 128;
constexpr int kTileN = 128;
constexpr int kMmaN = 64;              // columns of an mma
constexpr int kMmaM = 32;              // rows of an mma
constexpr int kSums = kMmaN * kMmaM / kWarpgroup;
constexpr int kBlocks = kTileM / kMmaM;
constexpr int kSummers = kTileN / kMmaN;
constexpr int kTileThreads = (kSummers + 1) * kWarpgroup;
constexpr int kStages = 4;
constexpr int kCopierRegisters = 40;           // of 168 a thread that the block begins with
constexpr int kSummerRegisters = 232;
constexpr int kColumnWords = kTileN + 8;       // lengths of rows that keep reads free of bank conflicts
constexpr int kScaleWords = kTileM + 8;

template <int kBits>
constexpr int kWordRows = kPiece * kBits / 32; // of weights a piece

template <int kBits>
struct alignas(1024) Stage {
    unsigned char x_codes[kTileM * kSwizzledRow];
    u32 codes_kn[kWordRows<kBits>][kColumnWords];
    float x_scales_gm[kGroupsPerPiece][kScaleWords];
    u16 scales_gn[kGroupsPerPiece][kTileN];
};

template <int kBits>
struct Shared {
    Stage<kBits> stages[kStages];
    u64 full[kStages], empty[kStages];
};

// Sets dots [4 rows of 8][2 columns][2 rows] of a lane; w is [2 halves of the inputs][2 columns].
__device__ inline void mma_m64n32k32(int (&dots)[kSums], const u32 (&w)[4], u64 x) {
    asm volatile(
        "{ .reg .pred add; setp.ne.u32 add, 0, 0;"
        " wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8"
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, add; }"
        : "+r"(dots[0]), "+r"(dots[1]), "+r"(dots[2]), "+r"(dots[3]), "+r"(dots[4]), "+r"(dots[5]), "+r"(dots[6]),
          "+r"(dots[7]), "+r"(dots[8]), "+r"(dots[9]), "+r"(dots[10]), "+r"(dots[11]), "+r"(dots[12]), "+r"(dots[13]),
          "+r"(dots[14]), "+r"(dots[15])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x));
}

// Not earlier than written here: values loaded ahead would take the registers of an mma under way.
__device__ inline void load_two(float (&values)[2], u32 from) {
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(values[0]), "=f"(values[1]) : "r"(from) : "memory");
}

// Nothing reads the dots before this.
__device__ inline void keep_until_here(int (&dots)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) asm volatile("" : "+r"(dots[i])::"memory");
}

// Four int8 codes of the low or high nibbles of a word. The bytes are 128 more in between, so nothing is borrowed.
__device__ inline u32 codes_of_nibbles(u32 word, int shift) {
    return (((word >> shift & 0x0f0f0f0fu) ^ 0x88888888u) - 0x08080808u) ^ 0x80808080u;
}

// What a thread of the first warpgroup copies of each piece. Rows and columns past the last are copies of the last, and
// summed up for nothing; groups past the last are zeros, which add nothing.
template <int kBits>
struct Copier {
    static constexpr int kRowChunks = kPiece / 16, kRowStep = kWarpgroup / kRowChunks, kRows = kTileM / kRowStep;
    static constexpr int kColumnChunks = kTileN / 4, kWordStep = kWarpgroup / kColumnChunks;
    static constexpr int kScaleRowStep = kWarpgroup / kGroupsPerPiece, kScaleRows = kTileM / kScaleRowStep;
    static constexpr int kPairs = kTileN / 2, kPairStep = kWarpgroup / kPairs;
    static constexpr int kWordsPerGroup = kBits;               // of a column: 32 codes of kBits
    static_assert(kRowStep % 8 == 0, "a thread's chunks are swizzled alike");

    const unsigned char* x_codes;
    const float* x_scales;
    const u32* codes_kn;
    const u16* scales_gn;
    int n_padded, num_groups, log2_groups_per_scale;
    // 32 bits hold every offset: activations of 2^32 bytes would be over a million rows.
    u32 row_from[kRows], scale_row_from[kScaleRows], pair_from;

    __device__ void start(int m) {
        const int thread = threadIdx.x, first_row = blockIdx.y * kTileM, first_column = blockIdx.x * kTileN;
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            row_from[i] = (u32)min(first_row + thread / kRowChunks + i * kRowStep, m - 1) * (num_groups * kGroup) +
                          thread % kRowChunks * 16;
#pragma unroll
        for (int i = 0; i < kScaleRows; ++i)
            scale_row_from[i] =
                (u32)min(first_row + thread / kGroupsPerPiece + i * kScaleRowStep, m - 1) * num_groups +
                thread % kGroupsPerPiece;
        codes_kn += (i64)(thread / kColumnChunks) * n_padded + min(first_column + thread % kColumnChunks * 4, n_padded - 4);
        pair_from = min(first_column + thread % kPairs * 2, n_padded - 2);
    }

    __device__ void copy(const Stage<kBits>& stage, int first_group) {
        const int thread = threadIdx.x, groups = num_groups - first_group;
        const u32 x_to = shared_address(stage.x_codes) + swizzled(thread / kRowChunks, thread % kRowChunks);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            copy_16(x_to + i * kRowStep * kSwizzledRow, x_codes + row_from[i], thread % kRowChunks / 2 < groups);
        const u32 w_to = shared_address(&stage.codes_kn[thread / kColumnChunks][thread % kColumnChunks * 4]);
#pragma unroll
        for (int i = 0; i < kWordRows<kBits> / kWordStep; ++i) {
            const int word_row = thread / kColumnChunks + i * kWordStep;
            copy_16(w_to + i * kWordStep * kColumnWords * 4, codes_kn, word_row / kWordsPerGroup < groups);
            codes_kn += (i64)kWordStep * n_padded;
        }
        const u32 scale_to = shared_address(&stage.x_scales_gm[thread % kGroupsPerPiece][thread / kGroupsPerPiece]);
#pragma unroll
        for (int i = 0; i < kScaleRows; ++i)
            copy_4(scale_to + i * kScaleRowStep * 4, x_scales + scale_row_from[i], thread % kGroupsPerPiece < groups);
        const u32 pair_to = shared_address(&stage.scales_gn[thread / kPairs][thread % kPairs * 2]);
#pragma unroll
        for (int i = 0; i < kGroupsPerPiece / kPairStep; ++i) {
            const int group = thread / kPairs + i * kPairStep;
            const u32 scale_group = (u32)(first_group + group) >> log2_groups_per_scale;
            copy_4(pair_to + i * kPairStep * kTileN * 2, scales_gn + (i64)scale_group * n_padded + pair_from,
                   group < groups);
        }
        commit_copies();
        x_codes += kPiece, x_scales += kGroupsPerPiece;
    }

    // All pieces; a stage is shown once the copies of the one after are under way.
    __device__ void run(const Shared<kBits>& shared) {
        const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
        const int num_pieces = (num_groups + kGroupsPerPiece - 1) / kGroupsPerPiece;
        const auto show = [&](int piece) {
            show_to_mma();
            arrive(full + piece % kStages * 8);
        };
#pragma unroll 1
        for (int piece = 0; piece < num_pieces; ++piece) {
            if (piece >= kStages) wait_barrier(empty + piece % kStages * 8, (piece / kStages - 1) & 1);
            copy(shared.stages[piece % kStages], piece * kGroupsPerPiece);
            if (piece == 0) continue;
            await_copies<1>();
            show(piece - 1);
        }
        await_copies<0>();
        show(num_pieces - 1);
    }
};

// A lane's part of a warpgroup's columns of a piece: the weights of two columns and their scales.
template <int kBits>
struct Weights {
    u32 codes[kGroupsPerPiece][4];
    float scales[kGroupsPerPiece][2];

    __device__ void load(const Stage<kBits>& stage, int column, int j) {
        constexpr int kWordsPerGroup = kBits;
#pragma unroll
        for (int g = 0; g < kGroupsPerPiece; ++g)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32& code = codes[g][2 * half + i];
                    if constexpr (kBits == 8) {
                        code = stage.codes_kn[g * kWordsPerGroup + 4 * half + j][column + 8 * i];
                    } else {
                        const u32 word = stage.codes_kn[g * kWordsPerGroup + 2 * half + j / 2][column + 8 * i];
                        code = codes_of_nibbles(word, j % 2 * 4);
                    }
                }
                scales[g][i] = half_to_float(stage.scales_gn[g][column + 8 * i]);
            }
    }
};

// Add a piece to the totals of a lane [blocks of 32 rows][4 rows of 8][2 columns][2 rows].
template <int kBits>
__device__ inline void sum_piece(const Stage<kBits>& stage, const Weights<kBits>& weights, int j,
                                 float (&total)[kBlocks][kSums]) {
    constexpr int kSteps = kBlocks * kGroupsPerPiece;
    const u64 x = operand(shared_address(stage.x_codes));
    const u32 x_scales_at = shared_address(&stage.x_scales_gm[0][2 * j]);
    int dots[2][kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) dots[0][i] = dots[1][i] = 0;
    float acc[kSums];
    const auto multiply = [&](int step) {
        const int block = step / kGroupsPerPiece, g = step % kGroupsPerPiece;
        start_mmas();
        mma_m64n32k32(dots[step % 2], weights.codes[g], x + (block * kMmaM * kSwizzledRow + g * kGroup) / 16);
        commit_mmas();
    };
    multiply(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const int block = step / kGroupsPerPiece, g = step % kGroupsPerPiece;
        if (step + 1 < kSteps) {
            multiply(step + 1);
            await_mmas<1>();
        } else {
            await_mmas<0>();
        }
        keep_until_here(dots[step % 2]);
#pragma unroll
        for (int i = 0; i < kSums; i += 4) {
            float x_scales[2];
            load_two(x_scales, x_scales_at + (g * kScaleWords + block * kMmaM + 2 * i) * 4);
#pragma unroll
            for (int d = 0; d < 4; ++d)
                acc[i + d] = fma_rn(__int2float_rn(dots[step % 2][i + d]),
                                    mul_rn(x_scales[d % 2], weights.scales[g][d / 2]), g == 0 ? 0.0f : acc[i + d]);
        }
        if (g == kGroupsPerPiece - 1) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) total[block][i] = add_rn(total[block][i], acc[i]);
        }
    }
}

template <int kBits>
__device__ inline void sum_tile(const Shared<kBits>& shared, float* out_mn, int m, int n, int num_pieces, int ldo,
                                int residual) {
    const int thread = threadIdx.x - kWarpgroup, warp = thread / kWarp, lane = thread % kWarp;
    const int quad = lane / 4, j = lane % 4;
    const int tile_column = warp * 16 + quad;                  // an mma's 16 columns of a warp, four warps, two mmas
    const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
    float total[kBlocks][kSums];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < kSums; ++i) total[b][i] = 0.0f;
#pragma unroll 1
    for (int piece = 0; piece < num_pieces; ++piece) {
        const Stage<kBits>& stage = shared.stages[piece % kStages];
        wait_barrier(full + piece % kStages * 8, piece / kStages & 1);
        Weights<kBits> weights;
        weights.load(stage, tile_column, j);
        sum_piece(stage, weights, j, total);
        __syncwarp();
        if (lane == 0) arrive(empty + piece % kStages * 8);
    }
    const int first_row = blockIdx.y * kTileM + 2 * j, first_column = blockIdx.x * kTileN + tile_column;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            const int row = first_row + b * kMmaM + i / 4 * 8 + i % 2, column = first_column + i / 2 % 2 * 8;
            float* const out = out_mn + (i64)row * ldo + column;
            if (row < m && column < n) *out = residual ? add_rn(*out, total[b][i]) : total[b][i];
        }
}

template <int kBits>
__device__ inline void linear_warpgroups(const u32* x_codes, const float* x_scales, const u32* codes_kn,
                                         const u16* scales_gn, float* out_mn, int m, int n, int n_padded, int k_padded,
                                         int groups_per_scale, int ldo, int residual) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& shared = *(Shared<kBits>*)bytes;
    const int num_groups = k_padded / kGroup;
    if (threadIdx.x < kStages) {
        init_barrier(shared_address(shared.full + threadIdx.x), kWarpgroup);
        init_barrier(shared_address(shared.empty + threadIdx.x), kSummers * kWarpgroup / kWarp);
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        give_registers_back<kCopierRegisters>();
        Copier<kBits> copier;
        copier.x_codes = (const unsigned char*)x_codes, copier.x_scales = x_scales;
        copier.codes_kn = codes_kn, copier.scales_gn = scales_gn;
        copier.n_padded = n_padded, copier.num_groups = num_groups;
        copier.log2_groups_per_scale = 31 - __clz(groups_per_scale);
        copier.start(m);
        copier.run(shared);
    } else {
        take_registers<kSummerRegisters>();
        const int num_pieces = (num_groups + kGroupsPerPiece - 1) / kGroupsPerPiece;
        sum_tile(shared, out_mn, m, n, num_pieces, ldo, residual);
    }
}

// Dynamic shared memory: a `Shared`.
#define LINEAR_WARPGROUPS(NAME, BITS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(kTileThreads, 1)                                                      \
    NAME(const u32* x_codes, const float* x_scales, const u32* codes_kn, const u16* scales_gn, float* out_mn, int m,   \
         int n, int n_padded, int k_padded, int groups_per_scale, int ldo, int residual) {                             \
        linear_warpgroups<BITS>(x_codes, x_scales, codes_kn, scales_gn, out_mn, m, n, n_padded, k_padded,              \
                                groups_per_scale, ldo, residual);                                                      \
    }

LINEAR_WARPGROUPS(linear_warpgroups_int8, 8)
LINEAR_WARPGROUPS(linear_warpgroups_int4, 4)
