// Linears of the vision tower: y = x w^T + bias, with what follows. Weights are as the checkpoint has them, [n][k].
//
// A row's sums run over the inputs in one order, whatever the number of rows. bfloat16: a block has 128 rows x 128
// columns and goes through the inputs 32 at a time, three stages of shared memory filled by cp.async; a warp has
// 64 x 64. float32: 64 x 64, a thread has 4 x 4, every product by fma.

#include "common.cuh"
#include "vision.cuh"
#include "vision_outputs.cuh"

constexpr int kTileM = 128;
constexpr int kTileN = 128;
constexpr int kTileK = 32;
constexpr int kWarpTile = 64;
constexpr int kWarpsM = kTileM / kWarpTile;
constexpr int kTileThreads = kWarpsM * (kTileN / kWarpTile) * kWarp;
constexpr int kStages = 3;
constexpr int kChunk = 8;                      // values of a copy of 16 bytes
constexpr int kRowChunks = kTileK / kChunk;

// Where a chunk of a row lies, in bytes: rows two apart take turns, so that the same chunk of eight rows meets in no
// bank. Rows 16 apart turn alike.
__device__ inline u32 place(int row, int chunk) { return 2 * (row * kTileK + (chunk ^ row / 2 % kRowChunks) * kChunk); }

struct Stage {
    u16 x[kTileM * kTileK];
    u16 w[kTileN * kTileK];
};

// A thread's share of the copies of one matrix: a chunk of every 32nd row of the tile.
struct Copies {
    static constexpr int kRowsAtOnce = kTileThreads / kRowChunks;
    const u16* from;
    i64 next_rows;
    int num_rows, num_inputs;          // left from its own on
    u32 to;

    __device__ Copies(const u16* from_rk, int first_row, int all_rows, int k, u32 tile) {
        const int chunk = threadIdx.x % kRowChunks, own_row = threadIdx.x / kRowChunks;
        from = from_rk + (i64)(first_row + own_row) * k + chunk * kChunk, next_rows = (i64)kRowsAtOnce * k;
        num_rows = all_rows - first_row - own_row, num_inputs = k - chunk * kChunk;
        to = tile + place(own_row, chunk);
    }

    // The next 32 inputs, into the stage at this distance from the first.
    __device__ void next(u32 stage) {
#pragma unroll
        for (int i = 0; i < kTileM / kRowsAtOnce; ++i)
            copy_async_16(to + stage + i * kRowsAtOnce * kTileK * 2, from + i * next_rows,
                          num_inputs > 0 && i * kRowsAtOnce < num_rows);
        from += kTileK, num_inputs -= kTileK;
    }
};

// A warp's outputs on their way out, 32 rows at a time: from the mma's registers to neighbours that are stored together.
constexpr int kOutRows = 32;
constexpr int kOutStride = kWarpTile + 8;
constexpr int kOutLanes = kWarpTile / kOutValues;

union Shared {
    Stage stages[kStages];
    float out[kTileThreads / kWarp][kOutRows * kOutStride];
};

// x_mk [m][k], w_nk [n][k] bfloat16, n and k multiples of 8; out_mn [m][n] bfloat16 or float32.
// Grid: (ceil(n / 128), ceil(m / 128)).
extern "C" __global__ void __launch_bounds__(kTileThreads, 2)
affine_bf16(const u16* x_mk, const u16* w_nk, const float* bias_n, void* out_mn, int m, int n, int k, int after,
            int out_is_float) {
    __shared__ __align__(128) Shared shared;
    const int first_m = blockIdx.y * kTileM, first_n = blockIdx.x * kTileN;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int warp_m = warp % kWarpsM * kWarpTile, warp_n = warp / kWarpsM * kWarpTile;
    const int num_steps = (k + kTileK - 1) / kTileK;

    const u32 x_at = shared_address(shared.stages[0].x), w_at = shared_address(shared.stages[0].w);
    Copies x_copies(x_mk, first_m, m, k, x_at), w_copies(w_nk, first_n, n, k, w_at);
    // Past the end nothing is read, and an empty group keeps the count of those on their way.
    const auto fetch = [&](u32 stage) {
        x_copies.next(stage), w_copies.next(stage);
        asm volatile("cp.async.commit_group;");
    };
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) fetch(step * sizeof(Stage));
    u32 use = 0, fill = (kStages - 1) * sizeof(Stage);
    const auto after_stage = [](u32 stage) {
        return stage == (kStages - 1) * sizeof(Stage) ? 0 : stage + (u32)sizeof(Stage);
    };
    u32 x_lane[2], w_lane[2];
#pragma unroll
    for (int inner = 0; inner < 2; ++inner) {
        x_lane[inner] = x_at + place(warp_m + lane % 16, inner * 2 + lane / 16);
        w_lane[inner] = w_at + place(warp_n + lane % 8 + lane / 16 * 8, inner * 2 + lane / 8 % 2);
    }

    float acc[kWarpTile / 16][kWarpTile / 8][4];
#pragma unroll
    for (int i = 0; i < kWarpTile / 16; ++i)
#pragma unroll
        for (int j = 0; j < kWarpTile / 8; ++j) acc[i][j][0] = acc[i][j][1] = acc[i][j][2] = acc[i][j][3] = 0.0f;

    // Operands of the next 16 inputs are loaded before these are multiplied.
    u32 x[2][kWarpTile / 16][4], w[2][kWarpTile / 16][4];
    const auto load = [&](int inner) {
#pragma unroll
        for (int i = 0; i < kWarpTile / 16; ++i) {
            load_tiles(x[inner][i], x_lane[inner] + use + i * 16 * kTileK * 2);
            load_tiles(w[inner][i], w_lane[inner] + use + i * 16 * kTileK * 2);
        }
    };
    const auto multiply = [&](int inner) {
#pragma unroll
        for (int j = 0; j < kWarpTile / 16; ++j)
#pragma unroll
            for (int i = 0; i < kWarpTile / 16; ++i) {
                mma_bf16(acc[i][2 * j], x[inner][i], w[inner][j][0], w[inner][j][1]);
                mma_bf16(acc[i][2 * j + 1], x[inner][i], w[inner][j][2], w[inner][j][3]);
            }
    };
    const auto await_stage = [] {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
        __syncthreads();
    };
    await_stage();
    load(0);
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        load(1);
        fetch(fill);
        fill = after_stage(fill);
        multiply(0);
        await_stage();
        use = after_stage(use);
        load(0);
        multiply(1);
    }

    asm volatile("cp.async.wait_group 0;");
    const int quad = lane / 4, pair = lane % 4 * 2;
    const int column = first_n + warp_n + lane % kOutLanes * kOutValues;
    float bias[kOutValues] = {};
    if (column < n) {
#pragma unroll
        for (int i = 0; i < kOutValues; ++i) bias[i] = bias_n[column + i];
    }
    float* out = shared.out[warp];
#pragma unroll
    for (int half = 0; half < kWarpTile / kOutRows; ++half) {
        // All warps are done with the stages, and no copy is on its way; this one is done with what it stored before.
        if (half == 0) __syncthreads();
        else __syncwarp();
#pragma unroll
        for (int i = 0; i < kOutRows / 16; ++i)
#pragma unroll
            for (int j = 0; j < kWarpTile / 8; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float* sums = acc[half * (kOutRows / 16) + i][j] + 2 * h;
                    *(float2*)(out + (i * 16 + h * 8 + quad) * kOutStride + j * 8 + pair) =
                        make_float2(sums[0], sums[1]);
                }
        __syncwarp();
        const int first_row = first_m + warp_m + half * kOutRows;
#pragma unroll 1
        for (int row = lane / kOutLanes; row < kOutRows; row += kWarp / kOutLanes)
            if (column < n && first_row + row < m) {
                const i64 at = (i64)(first_row + row) * n + column;
                Before before;
                before.load(out_mn, at, after == kAdd);
                store_outputs(out_mn, at, out + row * kOutStride + lane % kOutLanes * kOutValues, bias, before, after,
                              out_is_float);
            }
    }
}

constexpr int kFloatTile = 64;
constexpr int kFloatK = 16;
constexpr int kFloatThreads = 256;
constexpr int kOwn = 4;

__device__ inline void load_floats(float (*tile)[kFloatTile + 4], const float* from_rk, int first_row, int num_rows,
                                   int first_k, int k) {
    for (int at = threadIdx.x; at < kFloatTile * kFloatK; at += kFloatThreads) {
        const int row = at / kFloatK, i = at % kFloatK;
        const bool valid = first_row + row < num_rows && first_k + i < k;
        tile[i][row] = valid ? from_rk[(i64)(first_row + row) * k + first_k + i] : 0.0f;
    }
}

// The same in float32 for any n and k. Grid: (ceil(n / 64), ceil(m / 64)).
extern "C" __global__ void __launch_bounds__(kFloatThreads)
affine_f32(const float* x_mk, const float* w_nk, const float* bias_n, float* out_mn, int m, int n, int k, int after) {
    __shared__ __align__(16) float x[kFloatK][kFloatTile + 4], w[kFloatK][kFloatTile + 4];
    const int first_m = blockIdx.y * kFloatTile, first_n = blockIdx.x * kFloatTile;
    const int own_m = threadIdx.x / 16 * kOwn, own_n = threadIdx.x % 16 * kOwn;
    float acc[kOwn][kOwn] = {};
    for (int first_k = 0; first_k < k; first_k += kFloatK) {
        __syncthreads();
        load_floats(x, x_mk, first_m, m, first_k, k);
        load_floats(w, w_nk, first_n, n, first_k, k);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kFloatK; ++i) {
            const float4 a4 = *(const float4*)&x[i][own_m], b4 = *(const float4*)&w[i][own_n];
            const float a[kOwn] = {a4.x, a4.y, a4.z, a4.w}, b[kOwn] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
            for (int r = 0; r < kOwn; ++r)
#pragma unroll
                for (int c = 0; c < kOwn; ++c) acc[r][c] = fma_rn(a[r], b[c], acc[r][c]);
        }
    }
#pragma unroll
    for (int r = 0; r < kOwn; ++r)
#pragma unroll
        for (int c = 0; c < kOwn; ++c) {
            const int row = first_m + own_m + r, column = first_n + own_n + c;
            if (row >= m || column >= n) continue;
            float& out = out_mn[(i64)row * n + column];
            const float y = add_rn(acc[r][c], bias_n[column]);
            out = after == kAdd ? add_rn(out, y) : finish(y, after);
        }
}
