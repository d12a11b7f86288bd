// Attention of the patches of a frame, as vision_attention.cu has it, on Hopper's warpgroup mma.
//
// A block has 192 queries of a head: three warpgroups of 64 queries each, and one that copies keys and values ahead,
// 128 of them a tile. A warpgroup's scores of the next tile and its values of this one are multiplied while it takes
// exponentials (J. Shah et al., FlashAttention-3, 2024, section 3.2), and the others multiply meanwhile.
//
// Channels past the 64th lie in a panel of their own: 16 bytes of all rows, then the next 16.

#include "common.cuh"
#include "vision.cuh"
#include "barriers.cuh"
#include "warpgroup.cuh"

constexpr int kKeys = 128;
constexpr int kWarpgroupQueries = 64;
constexpr int kAttenders = 3;
constexpr int kQueries = kAttenders * kWarpgroupQueries;
constexpr int kAttendThreads = (kAttenders + 1) * kWarpgroup;
constexpr int kStages = 3;
constexpr int kPanel = 64;             // channels of a row of 128 bytes
constexpr int kChunk = 8;              // channels of a copy of 16 bytes
constexpr int kCopierRegisters = 32;   // of 128 a thread that the block begins with
constexpr int kAttenderRegisters = 160;

template <int kHeadDim>
struct Heads {
    static constexpr int kTail = kHeadDim - kPanel;
    static constexpr int kTailSteps = (kTail + 15) / 16;       // of 16 channels
    static constexpr int kTailBytes = kTailSteps * 32;         // of a row
};

template <int kHeadDim>
struct alignas(1024) Stage {
    unsigned char k[kKeys * kSwizzledRow], v[kKeys * kSwizzledRow];
    unsigned char k_tail[kKeys * Heads<kHeadDim>::kTailBytes + 16], v_tail[kKeys * Heads<kHeadDim>::kTail * 2 + 16];
};

template <int kHeadDim>
struct Shared {
    Stage<kHeadDim> stages[kStages];
    unsigned char q[kQueries * kSwizzledRow], q_tail[kQueries * Heads<kHeadDim>::kTailBytes + 16];
    u64 full[kStages], empty[kStages];
};

// c {=, +=} a b for 64 rows of a and 128 of b over 16 inputs, both rows in shared memory; nothing is kept of c before
// where `add` is 0.
__device__ inline void mma_m64n128k16(float (&c)[64], u64 a, u64 b, int add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.s32 add, %66, 0;"
        " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
        "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
        "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, %64, %65, add, 1, 1, 0, 0; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]),
          "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]),
          "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
          "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),
          "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
        : "l"(a), "l"(b), "r"(add));
}

// c += a b for 64 rows of a, in registers, and columns of b over 16 rows of it in shared memory.
__device__ inline void mma_m64n64k16(float (&c)[32], const u32* a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
        "%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ inline void mma_m64n8k16(float (&c)[4], const u32* a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3"
        "}, {%4,%5,%6,%7}, %8, 1, 1, 1, 1;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// An operand of channels past the panel. PTX ISA, "Matrix descriptor" without swizzle: the bytes from eight rows to the
// next, and from eight channels to the next; along which an mma takes its inputs decides which of the two leads.
__device__ inline u64 tail_operand(u32 address, int leading, int stride) {
    return (u64)(stride >> 4) << 32 | (u64)(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// Copies of rows of a head. Rows past the end, and channels past the head's, are zeros.
template <int kHeadDim>
struct Copier {
    static constexpr int kPanelChunks = kPanel / kChunk, kRowStep = kWarpgroup / kPanelChunks;
    const u16* frame;
    int frame_rows, ld;

    // kTailChunks 16 bytes of each row past the panel; those past the head's channels are not read.
    template <int kRows, int kTailChunks>
    __device__ void copy(u32 panel, u32 tail, const u16* head, int first_row) const {
        const int thread = threadIdx.x, chunk = thread % kPanelChunks, own = thread / kPanelChunks;
        const u16* const from = head + (i64)(first_row + own) * ld + chunk * kChunk;
#pragma unroll
        for (int row = 0; row < kRows; row += kRowStep)
            copy_16(panel + swizzled(own, chunk) + row * kSwizzledRow, from + (i64)row * ld,
                    first_row + own + row < frame_rows);
#pragma unroll
        for (int c = 0; c < kTailChunks; ++c)
#pragma unroll
            for (int row = 0; row < kRows; row += kWarpgroup)
                if (kRows % kWarpgroup == 0 || row + thread < kRows)
                    copy_16(tail + (c * kRows + row + thread) * 16,
                            head + (i64)(first_row + row + thread) * ld + kPanel + c * kChunk,
                            c * kChunk < Heads<kHeadDim>::kTail && first_row + row + thread < frame_rows);
    }

    // The queries with the first tile, then all others; a tile is shown once the copies of the next are under way.
    __device__ void run(const Shared<kHeadDim>& shared, int first_query, int num_tiles, int n) const {
        const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
        const auto show = [&](int tile) {
            show_to_mma();
            arrive(full + tile % kStages * 8);
        };
        copy<kQueries, Heads<kHeadDim>::kTailBytes / 16>(shared_address(shared.q), shared_address(shared.q_tail), frame,
                                                        first_query);
#pragma unroll 1
        for (int tile = 0; tile < num_tiles; ++tile) {
            if (tile >= kStages) wait_barrier(empty + tile % kStages * 8, (tile / kStages - 1) & 1);
            const Stage<kHeadDim>& stage = shared.stages[tile % kStages];
            copy<kKeys, Heads<kHeadDim>::kTailBytes / 16>(shared_address(stage.k), shared_address(stage.k_tail),
                                                         frame + n, tile * kKeys);
            copy<kKeys, Heads<kHeadDim>::kTail / kChunk>(shared_address(stage.v), shared_address(stage.v_tail),
                                                        frame + 2 * n, tile * kKeys);
            commit_copies();
            if (tile == 0) continue;
            await_copies<1>();
            show(tile - 1);
        }
        await_copies<0>();
        show(num_tiles - 1);
    }
};

// A warpgroup's 64 queries. A lane's rows are lane / 4 and eight below it, of its warp's 16.
template <int kHeadDim>
struct Attender {
    static constexpr int kSteps = kKeys / 16, kScores = kKeys / 2, kOuts = kPanel / 2;
    static constexpr int kTail = Heads<kHeadDim>::kTail, kTailSteps = Heads<kHeadDim>::kTailSteps;

    float scores[kScores], out[kOuts], tail_out[4], row_max[2], row_sum[2];
    u32 weights[kSteps][4];

    __device__ void start() {
#pragma unroll
        for (int i = 0; i < kOuts; ++i) out[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) tail_out[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < kScores; ++i) scores[i] = 0.0f;
        row_max[0] = row_max[1] = minus_infinity(), row_sum[0] = row_sum[1] = 0.0f;
    }

    __device__ void multiply_keys(const Shared<kHeadDim>& shared, const Stage<kHeadDim>& stage, int first_query) {
        const u64 q = operand(shared_address(shared.q) + first_query * kSwizzledRow);
        const u64 k = operand(shared_address(stage.k));
#pragma unroll
        for (int step = 0; step < kPanel / 16; ++step) mma_m64n128k16(scores, q + step * 2, k + step * 2, step > 0);
        if constexpr (kTail > 0) {
            const u64 q_tail = tail_operand(shared_address(shared.q_tail) + first_query * 16, kQueries * 16, 128);
            const u64 k_tail = tail_operand(shared_address(stage.k_tail), kKeys * 16, 128);
            mma_m64n128k16(scores, q_tail, k_tail, 1);
        }
        commit_mmas();
    }

    __device__ void multiply_values(const Stage<kHeadDim>& stage) {
        const u64 v = operand(shared_address(stage.v));
#pragma unroll
        for (int step = 0; step < kSteps; ++step) mma_m64n64k16(out, weights[step], v + step * (16 * kSwizzledRow >> 4));
        if constexpr (kTail > 0) {
            const u64 v_tail = tail_operand(shared_address(stage.v_tail), 128, 128);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) mma_m64n8k16(tail_out, weights[step], v_tail + step * 16);
        }
        commit_mmas();
    }

    // The scores of keys past the end count for nothing.
    __device__ void mask(int num_left) {
        const int first = threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            if (i / 4 * 8 + first + i % 2 >= num_left) scores[i] = minus_infinity();
    }

    // Scores become weights; `keep` is what sums over the tiles before are multiplied by.
    __device__ void take_exponentials(float scale_log2, float (&keep)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = row_max[h];
#pragma unroll
            for (int i = 0; i < kScores; i += 4) top = fmaxf(top, fmaxf(scores[i + 2 * h], scores[i + 2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            keep[h] = exp2_fast(mul_rn(sub_rn(row_max[h], top), scale_log2));
            row_max[h] = top;
            const float shift = -mul_rn(top, scale_log2);
            float sum = mul_rn(row_sum[h], keep[h]);
#pragma unroll
            for (int i = 0; i < kScores; i += 4) {
                float& first = scores[i + 2 * h];
                float& second = scores[i + 2 * h + 1];
                first = exp2_fast(fma_rn(first, scale_log2, shift));
                second = exp2_fast(fma_rn(second, scale_log2, shift));
                sum = add_rn(sum, add_rn(first, second));
            }
            row_sum[h] = sum;
        }
    }

    // To bfloat16, as the next mma's first operand.
    __device__ void round_weights() {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                weights[step][i] = pack_bf16(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
    }

    __device__ void rescale(const float (&keep)[2]) {
#pragma unroll
        for (int i = 0; i < kOuts; ++i) out[i] = mul_rn(out[i], keep[i / 2 % 2]);
        if constexpr (kTail > 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) tail_out[i] = mul_rn(tail_out[i], keep[i / 2]);
        }
    }

    __device__ void store(u16* out_mn, int first_row, int num_left, int n) {
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = row_sum[h];
            sum = add_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
            sum = add_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
            if (h * 8 + lane / 4 >= num_left) continue;
            const float share = div_rn(1.0f, sum);
            u16* const row = out_mn + (i64)(first_row + h * 8 + lane / 4) * n + lane % 4 * 2;
#pragma unroll
            for (int i = 2 * h; i < kOuts; i += 4)
                *(u32*)(row + i / 4 * 8) = pack_bf16(mul_rn(out[i], share), mul_rn(out[i + 1], share));
            if constexpr (kTail > 0)
                *(u32*)(row + kPanel) = pack_bf16(mul_rn(tail_out[2 * h], share), mul_rn(tail_out[2 * h + 1], share));
        }
    }

    __device__ void run(const Shared<kHeadDim>& shared, int first_query, int frame_rows, int num_tiles,
                        float scale_log2) {
        const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
        float keep[2];
        start();
        wait_barrier(full, 0);
        start_mmas();
        multiply_keys(shared, shared.stages[0], first_query);
        await_mmas<0>();
        keep_until_here(scores);
        if (num_tiles == 1) mask(frame_rows);
        take_exponentials(scale_log2, keep);
        round_weights();
#pragma unroll 1
        for (int tile = 1; tile < num_tiles; ++tile) {
            const int before = (tile - 1) % kStages;
            wait_barrier(full + tile % kStages * 8, tile / kStages & 1);
            start_mmas();
            multiply_keys(shared, shared.stages[tile % kStages], first_query);
            multiply_values(shared.stages[before]);
            await_mmas<1>();
            keep_until_here(scores);
            if (tile == num_tiles - 1) mask(frame_rows - tile * kKeys);
            take_exponentials(scale_log2, keep);
            await_mmas<0>();
            keep_until_here(out), keep_until_here(tail_out);
            if (threadIdx.x % kWarp == 0) arrive(empty + before * 8);
            rescale(keep);
            round_weights();
        }
        start_mmas();
        multiply_values(shared.stages[(num_tiles - 1) % kStages]);
        await_mmas<0>();
        keep_until_here(out), keep_until_here(tail_out);
    }
};

// Grid: (ceil(frame_rows / 192), heads, frames). Dynamic shared memory: a `Shared`.
template <int kHeadDim>
__device__ inline void attend_patches(const u16* qkv_mn, u16* out_mn, int frame_rows, int num_heads, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& shared = *(Shared<kHeadDim>*)bytes;
    const int n = num_heads * kHeadDim, first_query = blockIdx.x * kQueries;
    const int num_tiles = (frame_rows + kKeys - 1) / kKeys;
    const u16* const frame = qkv_mn + (i64)blockIdx.z * frame_rows * 3 * n + blockIdx.y * kHeadDim;
    if (threadIdx.x < kStages) {
        init_barrier(shared_address(shared.full + threadIdx.x), kWarpgroup);
        init_barrier(shared_address(shared.empty + threadIdx.x), kAttenders * kWarpgroup / kWarp);
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        give_registers_back<kCopierRegisters>();
        const Copier<kHeadDim> copier{frame, frame_rows, 3 * n};
        copier.run(shared, first_query, num_tiles, n);
    } else {
        take_registers<kAttenderRegisters>();
        const int thread = threadIdx.x - kWarpgroup, own = thread / kWarpgroup * kWarpgroupQueries;
        const int row = first_query + own + thread % kWarpgroup / kWarp * 16;
        Attender<kHeadDim> attender;
        attender.run(shared, own, frame_rows, num_tiles, scale_log2);
        attender.store(out_mn + blockIdx.y * kHeadDim, blockIdx.z * frame_rows + row, frame_rows - row, n);
    }
}

#define ATTEND_PATCHES_WARPGROUPS(HEAD_DIM)                                                                          \
    extern "C" __global__ void __launch_bounds__(kAttendThreads, 1)                                                  \
    attend_patches_warpgroups_##HEAD_DIM(const u16* qkv_mn, u16* out_mn, int frame_rows, int num_heads,              \
                                         float scale_log2) {                                                         \
        attend_patches<HEAD_DIM>(qkv_mn, out_mn, frame_rows, num_heads, scale_log2);                                 \
    }
ATTEND_PATCHES_WARPGROUPS(64)
ATTEND_PATCHES_WARPGROUPS(72)
