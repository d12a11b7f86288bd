// Linears over packed weights for many rows on Hopper's warpgroup mma. The sums are those of gemm.cu to the bit.
//
// A block owns 128 rows x 128 columns and goes through the pieces of 128 inputs. One warpgroup fills a ring of stages:
// the copy engine brings codes and scales of weights and codes of rows, threads bring the scales of rows. Two sum up,
// each 64 columns of all rows. Weights are the mma's first operand, from registers: a lane's words are those of the
// packed matrix, four inputs of a column. Activations are its second, from shared memory.
//
// A warp issues one instruction to make an output's dot of 32 inputs a float, one for the product of scales, one for
// the sum; the mma of the next dots runs meanwhile, over two pieces at a time: ptxas takes no mma that is under way
// where a loop begins anew. Only an mma's 64 rows are summed up over a piece at a time, which leaves registers for
// that.

#include "common.cuh"
#include "barriers.cuh"
#include "warpgroup.cuh"
#include "copy_engine.cuh"

constexpr int kTileM = 128;
constexpr int kTileN = 128;
constexpr int kMmaN = 64;              // columns of an mma
constexpr int kMmaM = 64;              // rows of an mma
constexpr int kSums = kMmaN * kMmaM / kWarpgroup;
constexpr int kBlocks = kTileM / kMmaM;
constexpr int kSummers = kTileN / kMmaN;
constexpr int kTileThreads = (kSummers + 1) * kWarpgroup;
constexpr int kStages = 4;
constexpr int kTogether = 2;           // pieces without a break between mmas
constexpr int kCopierRegisters = 24;           // of 168 a thread that the block begins with
constexpr int kSummerRegisters = 240;
constexpr int kColumnWords = kTileN + 8;       // of a box, which reaches into the next tile: rows in different banks
constexpr int kScaleRun = kMmaM / 4 + 4;       // of a lane's scales of an mma's rows
constexpr int kScaleWords = kBlocks * 4 * kScaleRun;
static_assert(kStages % kTogether == 0);

template <int kBits>
constexpr int kWordRows = kPiece * kBits / 32; // of weights a piece

template <int kBits>
struct alignas(1024) Stage {
    unsigned char x_codes[kTileM * kSwizzledRow];
    u32 codes_kn[kWordRows<kBits>][kColumnWords];
    u16 scales_gn[kGroupsPerPiece][kTileN];            // or the first row, of a scale for a piece or more
    float x_scales_gm[kGroupsPerPiece][kScaleWords];   // rows by `scale_place`
};

template <int kBits>
struct Shared {
    Stage<kBits> stages[kStages];
    u64 full[kStages], empty[kStages];
};

struct Linear {
    const float* x_scales;
    float* out_mn;
    int m, n, num_groups, log2_groups_per_scale, ldo, residual;

    // Those past the last group add nothing.
    __device__ int num_pieces() const {
        constexpr int kGroupsTogether = kTogether * kGroupsPerPiece;
        return (num_groups + kGroupsTogether - 1) / kGroupsTogether * kTogether;
    }
};

// Sets dots [8 rows of 8][2 columns][2 rows] of a lane; w is [2 halves of the inputs][2 columns].
__device__ inline void mma_m64n64k32(int (&dots)[kSums], const u32 (&w)[4], u64 x) {
    asm volatile(
        "{ .reg .pred add; setp.ne.u32 add, 0, 0;"
        " wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8"
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
        "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add; }"
        : "+r"(dots[0]), "+r"(dots[1]), "+r"(dots[2]), "+r"(dots[3]), "+r"(dots[4]), "+r"(dots[5]), "+r"(dots[6]),
          "+r"(dots[7]), "+r"(dots[8]), "+r"(dots[9]), "+r"(dots[10]), "+r"(dots[11]), "+r"(dots[12]), "+r"(dots[13]),
          "+r"(dots[14]), "+r"(dots[15]), "+r"(dots[16]), "+r"(dots[17]), "+r"(dots[18]), "+r"(dots[19]),
          "+r"(dots[20]), "+r"(dots[21]), "+r"(dots[22]), "+r"(dots[23]), "+r"(dots[24]), "+r"(dots[25]),
          "+r"(dots[26]), "+r"(dots[27]), "+r"(dots[28]), "+r"(dots[29]), "+r"(dots[30]), "+r"(dots[31])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x));
}

// Not earlier than written here: values loaded ahead would take the registers of an mma under way.
__device__ inline void load_four(float (&values)[4], u32 from) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "r"(from)
                 : "memory");
}

// Four int8 codes of the low or high nibbles of a word. The bytes are 128 more in between, so nothing is borrowed.
__device__ inline u32 codes_of_nibbles(u32 word, int shift) {
    return (((word >> shift & 0x0f0f0f0fu) ^ 0x88888888u) - 0x08080808u) ^ 0x80808080u;
}

// Where a row's scale stands, so that a lane's of an mma are neighbours: [mmas][lanes of a quad][8 rows of 8][2 rows].
__device__ inline int scale_place(int row) {
    return (row / kMmaM * 4 + row % 8 / 2) * kScaleRun + row % kMmaM / 8 * 2 + row % 2;
}

// What the boxes of a linear are copied by: codes of activations; codes and scales of weights.
struct CopyMaps {
    const CopyMap &x, &codes, &scales;
};

// The first warpgroup: one thread has boxes copied, each writes a row's scales. Rows past the last have scales of zero;
// groups past the last are zeros throughout, which add nothing.
template <int kBits>
struct Copier {
    static_assert(kTileM == kWarpgroup);
    static constexpr int kCodeBytes = kTileM * kSwizzledRow + kWordRows<kBits> * kColumnWords * 4;
    static constexpr int kScaleRowBytes = kTileN * 2;

    const Linear& of;
    const CopyMaps& maps;

    __device__ void load_scales(float (&scales)[kGroupsPerPiece], int piece) const {
        const int row = blockIdx.y * kTileM + threadIdx.x, first = piece * kGroupsPerPiece;
        const float* const from = of.x_scales + (i64)row * of.num_groups + first;
        if (of.num_groups % kGroupsPerPiece == 0) {
            const float4 four = row < of.m && first < of.num_groups ? *(const float4*)from : float4{};
            scales[0] = four.x, scales[1] = four.y, scales[2] = four.z, scales[3] = four.w;
            return;
        }
#pragma unroll
        for (int g = 0; g < kGroupsPerPiece; ++g) scales[g] = row < of.m && first + g < of.num_groups ? from[g] : 0.0f;
    }

    // Into the second-level cache: what a row's sums are added to.
    __device__ void prefetch_before() const {
        constexpr int kLineFloats = 128 / sizeof(float);
        const int row = blockIdx.y * kTileM + threadIdx.x, first_column = blockIdx.x * kTileN;
        if (row >= of.m) return;
#pragma unroll 1
        for (int column = first_column; column < min(first_column + kTileN, of.n); column += kLineFloats)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(of.out_mn + (i64)row * of.ldo + column));
    }

    __device__ void copy(const Stage<kBits>& stage, int piece, u32 full) const {
        const int first_row = blockIdx.y * kTileM, first_column = blockIdx.x * kTileN;
        // A box has the rows of a piece, or the one that serves all of it.
        const int scale_rows = of.log2_groups_per_scale ? 1 : kGroupsPerPiece;
        expect_bytes(full, kCodeBytes + scale_rows * kScaleRowBytes);
        copy_box(shared_address(stage.x_codes), maps.x, piece * kPiece, first_row, full);
        copy_box(shared_address(stage.codes_kn), maps.codes, first_column, piece * kWordRows<kBits>, full);
        copy_box(shared_address(stage.scales_gn), maps.scales, first_column,
                 piece * kGroupsPerPiece >> of.log2_groups_per_scale, full);
    }

    __device__ void run(Shared<kBits>& shared) const {
        const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
        const int num_pieces = of.num_pieces();
        float scales[kGroupsPerPiece];
        load_scales(scales, 0);
#pragma unroll 1
        for (int piece = 0; piece < num_pieces; ++piece) {
            const int at = piece % kStages;
            Stage<kBits>& stage = shared.stages[at];
            if (piece >= kStages) wait_barrier(empty + at * 8, (piece / kStages - 1) & 1);
            // Asked for before its own scales, which may have to be waited for, are written.
            if (threadIdx.x == 0) copy(stage, piece, full + at * 8);
#pragma unroll
            for (int g = 0; g < kGroupsPerPiece; ++g) stage.x_scales_gm[g][scale_place(threadIdx.x)] = scales[g];
            arrive(full + at * 8);
            load_scales(scales, piece + 1);
            if (of.residual && piece == num_pieces - kTogether) prefetch_before();
        }
    }
};

// What sums up: a lane's weights of two neighbouring columns of a piece, and dots under way.
template <int kBits>
struct Summer {
    static constexpr int kSteps = kBlocks * kGroupsPerPiece;   // mmas of a piece

    int column, j;                                             // in the tile; lane of a quad
    int log2_groups_per_scale;
    u32 codes[kGroupsPerPiece][4];
    float scales[kGroupsPerPiece][2];
    int dots[2][kSums];

    __device__ void load_weights(const Stage<kBits>& stage, int g) {
        constexpr int kWordsPerGroup = kBits;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = g * kWordsPerGroup + (kBits == 8 ? 4 * half + j : 2 * half + j / 2);
            const uint2 words = *(const uint2*)&stage.codes_kn[row][column];
            codes[g][2 * half] = kBits == 8 ? words.x : codes_of_nibbles(words.x, j % 2 * 4);
            codes[g][2 * half + 1] = kBits == 8 ? words.y : codes_of_nibbles(words.y, j % 2 * 4);
        }
        const u32 pair = *(const u32*)&stage.scales_gn[g >> log2_groups_per_scale][column];
        scales[g][0] = half_to_float((u16)pair), scales[g][1] = half_to_float((u16)(pair >> 16));
    }

    __device__ void multiply(const Stage<kBits>& stage, int step) {
        const int block = step / kGroupsPerPiece, g = step % kGroupsPerPiece;
        const u64 x = operand(shared_address(stage.x_codes));
        start_mmas();
        mma_m64n64k32(dots[step % 2], codes[g], x + (block * kMmaM * kSwizzledRow + g * kGroup) / 16);
        commit_mmas();
    }

    // Add a piece, whose first dots are under way, to the totals of a lane [mmas][8 rows of 8][2 columns][2 rows]. Not
    // for the last piece of those together: load the next one's weights as this one's are done with, begin its dots.
    template <bool kLast>
    __device__ void sum_piece(const Stage<kBits>& stage, const Stage<kBits>& next, float (&total)[kBlocks][kSums]) {
        const u32 x_scales_at = shared_address(&stage.x_scales_gm[0][j * kScaleRun]);
        float acc[kSums];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int block = step / kGroupsPerPiece, g = step % kGroupsPerPiece;
            const u32 step_scales_at = x_scales_at + (g * kScaleWords + block * 4 * kScaleRun) * 4;
            const bool load_next = !kLast && block == kBlocks - 1;
            float x_scales[4];
            if (step + 1 < kSteps) {
                multiply(stage, step + 1);
            } else if (!kLast) {
                multiply(next, 0);
            }
            load_four(x_scales, step_scales_at);
            if (kLast && step + 1 == kSteps) {
                await_mmas<0>();
            } else {
                await_mmas<1>();
            }
            keep_until_here(dots[step % 2]);
#pragma unroll
            for (int i = 0; i < kSums; i += 8) {
                if (i > 0) load_four(x_scales, step_scales_at + i * 2);
#pragma unroll
                for (int d = 0; d < 8; ++d)
                    acc[i + d] = fma_rn(__int2float_rn(dots[step % 2][i + d]),
                                        mul_rn(x_scales[d / 4 * 2 + d % 2], scales[g][d / 2 % 2]),
                                        g == 0 ? 0.0f : acc[i + d]);
            }
            if (load_next) load_weights(next, g);
            if (g == kGroupsPerPiece - 1) {
#pragma unroll
                for (int i = 0; i < kSums; ++i) total[block][i] = add_rn(total[block][i], acc[i]);
            }
        }
    }

    __device__ void sum_tile(const Shared<kBits>& shared, int num_pieces, float (&total)[kBlocks][kSums]) {
        const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
        const auto hand_back = [&](int stage) {
            __syncwarp();
            if (threadIdx.x % kWarp == 0) arrive(empty + stage * 8);
        };
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kSums; ++i) total[b][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < kSums; ++i) dots[0][i] = dots[1][i] = 0;
#pragma unroll 1
        for (int piece = 0; piece < num_pieces; piece += kTogether) {
            const int first = piece % kStages, second = first + 1;
            wait_barrier(full + first * 8, piece / kStages & 1);
            wait_barrier(full + second * 8, piece / kStages & 1);
#pragma unroll
            for (int g = 0; g < kGroupsPerPiece; ++g) load_weights(shared.stages[first], g);
            multiply(shared.stages[first], 0);
            sum_piece<false>(shared.stages[first], shared.stages[second], total);
            hand_back(first);
            sum_piece<true>(shared.stages[second], shared.stages[second], total);
            hand_back(second);
        }
    }
};

// Store or add a lane's sums of an mma's rows. What they are added to is loaded before the first is stored: a compiler
// cannot know that no store changes it.
__device__ inline void store(const Linear& of, int first_row, int column, const float (&total)[kSums]) {
    const bool paired = of.ldo % 2 == 0 && of.n % 2 == 0 && (u64)of.out_mn % 8 == 0;
    float* const out = of.out_mn + (i64)first_row * of.ldo + column;
    float sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = total[i];
    if (of.residual) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            const int row = i / 4 * 8 + i % 2, c = i / 2 % 2;
            const bool valid = first_row + row < of.m && column + c < of.n;
            sums[i] = valid ? out[(i64)row * of.ldo + c] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = add_rn(sums[i], total[i]);
    }
    if (column >= of.n) return;
#pragma unroll
    for (int i = 0; i < kSums; i += i % 2 ? 3 : 1) {
        const int row = i / 4 * 8 + i % 2;
        float* const to = out + (i64)row * of.ldo;
        if (first_row + row >= of.m) continue;
        if (paired) {
            *(float2*)to = float2{sums[i], sums[i + 2]};
        } else {
            to[0] = sums[i];
            if (column + 1 < of.n) to[1] = sums[i + 2];
        }
    }
}

template <int kBits>
__device__ inline void linear_warpgroups(const Linear& of, const CopyMaps& maps) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& shared = *(Shared<kBits>*)bytes;
    if (threadIdx.x < kStages) {
        init_barrier(shared_address(shared.full + threadIdx.x), kWarpgroup);
        init_barrier(shared_address(shared.empty + threadIdx.x), kSummers * kWarpgroup / kWarp);
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        give_registers_back<kCopierRegisters>();
        Copier<kBits>{of, maps}.run(shared);
    } else {
        take_registers<kSummerRegisters>();
        // A warp has 16 of the tile's columns: four warps an mma, two mmas.
        const int warp = (threadIdx.x - kWarpgroup) / kWarp, lane = threadIdx.x % kWarp;
        Summer<kBits> summer;
        summer.column = warp * 16 + lane / 4 * 2, summer.j = lane % 4;
        summer.log2_groups_per_scale = of.log2_groups_per_scale;
        float total[kBlocks][kSums];
        summer.sum_tile(shared, of.num_pieces(), total);
        const int first_row = blockIdx.y * kTileM + 2 * summer.j, column = blockIdx.x * kTileN + summer.column;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) store(of, first_row + b * kMmaM, column, total[b]);
    }
}

// Dynamic shared memory: a `Shared`. Grid: (ceil(n_padded / 128), ceil(m / 128)). Boxes of the maps: 128 rows x 128
// bytes of x, swizzled; `kWordRows` x `kColumnWords` words; 4 x 128 scales, or 1 x 128 where one serves a piece or
// more. Rows of x past m may hold anything.
#define LINEAR_WARPGROUPS(NAME, BITS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(kTileThreads, 1)                                                      \
    NAME(const __grid_constant__ CopyMap x_map, const __grid_constant__ CopyMap codes_map,                             \
         const __grid_constant__ CopyMap scales_map, const float* x_scales, float* out_mn, int m, int n, int k_padded, \
         int groups_per_scale, int ldo, int residual) {                                                                \
        linear_warpgroups<BITS>(                                                                                       \
            {x_scales, out_mn, m, n, k_padded / kGroup, 31 - __clz(groups_per_scale), ldo, residual},                  \
            {x_map, codes_map, scales_map});                                                                           \
    }

LINEAR_WARPGROUPS(linear_warpgroups_int8, 8)
LINEAR_WARPGROUPS(linear_warpgroups_int4, 4)
