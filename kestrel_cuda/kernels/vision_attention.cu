// Full attention of the patches of a frame over one another, softmax(q k^T / sqrt(d)) v, rotated queries and keys.
//
// A row of qkv_mn holds queries, keys and values of all heads, in this order. Keys are taken 64 at a time, so memory is
// linear in the number of patches; a running maximum and sum are kept for each query, in an order that depends on the
// frame's size alone.
//
// bfloat16: a warp has 16 queries of one head, whose weights go from the scores' registers straight into the values'
// mma. Keys and values of the next patches are on their way while these are used. A warp waits for what it reads, and for
// no other warp as long as that is not a tile behind, so that some multiply while others take exponentials.

#include "common.cuh"
#include "barriers.cuh"
#include "vision.cuh"

constexpr int kKeys = 64;
constexpr int kChunk = 8;                                                // values of a copy of 16 bytes

template <int kHeadDim>
struct Heads {
    static constexpr int kSteps = (kHeadDim + 15) / 16;                  // mma steps of a score
    static constexpr int kTiles = kHeadDim / 8;                          // mma columns of the values
    static constexpr int kStages = kHeadDim <= 80 ? 3 : 2;
    static constexpr int kUsedChunks = kHeadDim / kChunk;
    // Whole steps, and odd, so that the same chunk of eight rows meets in no bank.
    static constexpr int kRowChunks = kSteps * 2 + 1;
    static constexpr int kStride = kRowChunks * kChunk;
};

// A thread's share of the copies of rows of a head into shared memory: a chunk of every kRowsAtOnce-th row. Rows past
// the end, and channels past the head's, read as zero.
template <int kHeadDim, int kThreads>
struct Copies {
    using H = Heads<kHeadDim>;
    static constexpr int kChunks = H::kSteps * 2, kRowsAtOnce = kThreads / kChunks;
    int row, num_rows;
    bool is_used;
    i64 from;
    u32 to;

    __device__ Copies(int num_rows, int ld) : num_rows(num_rows) {
        const int chunk = threadIdx.x % kChunks;
        row = threadIdx.x / kChunks, is_used = chunk < H::kUsedChunks;
        from = (i64)row * ld + chunk * kChunk, to = 2 * (row * H::kStride + chunk * kChunk);
    }

    template <int kRows>
    __device__ void fetch(u32 tile, const u16* rows, int first, int ld) const {
        const u16* at = rows + (i64)first * ld + from;
        const int left = num_rows - first - row;
#pragma unroll
        for (int more = 0; more < kRows; more += kRowsAtOnce) {
            const bool has_room = kThreads % kChunks == 0 ? row + more < kRows
                                                          : row < kRowsAtOnce && row + more < kRows;
            if (has_room) copy_async_16(tile + to + 2 * more * H::kStride, at + more * ld, is_used && more < left);
        }
    }
};

template <int kHeadDim>
struct Tiles {
    using H = Heads<kHeadDim>;
    u16 k[H::kStages][kKeys * H::kStride];
    u16 v[H::kStages][kKeys * H::kStride];
};

// Grid: (ceil(frame_rows / (16 kWarps)), heads, frames). Dynamic shared memory: Tiles, which has the queries first.
template <int kHeadDim, int kWarps>
__device__ inline void attend_patches(const u16* qkv_mn, u16* out_mn, int frame_rows, int num_heads, float scale_log2) {
    using H = Heads<kHeadDim>;
    constexpr int kThreads = kWarps * kWarp, kQueries = kWarps * 16;
    extern __shared__ __align__(128) unsigned char bytes[];
    Tiles<kHeadDim>& shared = *(Tiles<kHeadDim>*)bytes;
    const int n = num_heads * kHeadDim, ld = 3 * n;
    const int first_query = blockIdx.x * kQueries;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const u16* frame = qkv_mn + (i64)blockIdx.z * frame_rows * ld + blockIdx.y * kHeadDim;
    const int num_tiles = (frame_rows + kKeys - 1) / kKeys;

    const u32 k_at = shared_address(shared.k), v_at = shared_address(shared.v);
    constexpr u32 kTileBytes = sizeof(shared.k[0]);
    const Copies<kHeadDim, kThreads> copies(frame_rows, ld);
    static_assert(sizeof(Tiles<kHeadDim>) >= kQueries * H::kStride * sizeof(u16), "queries fit");
    copies.template fetch<kQueries>(k_at, frame, first_query, ld);
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;");
    __syncthreads();
    u32 q[H::kSteps][4];
#pragma unroll
    for (int step = 0; step < H::kSteps; ++step)
        load_tiles(q[step], k_at + 2 * ((warp * 16 + lane % 16) * H::kStride + (step * 2 + lane / 16) * kChunk));
    __syncthreads();

    // A warp may be a tile ahead of another: while some multiply, others take exponentials.
    constexpr int kStages = H::kStages;
    __shared__ u64 barriers[2 * kStages];
    const u32 full = shared_address(barriers), empty = full + kStages * 8;  // copies have arrived; all warps are done
    if (threadIdx.x < kStages) init_barrier(full + threadIdx.x * 8, kThreads);
    else if (threadIdx.x < 2 * kStages) init_barrier(full + threadIdx.x * 8, kWarps);
    __syncthreads();
    int fill = 0, use = 0;
    u32 fill_parity = 1, use_parity = 0;
    const auto fetch = [&](int tile) {
        if (tile >= num_tiles) return;
        wait_barrier(empty + fill * 8, fill_parity);
        copies.template fetch<kKeys>(k_at + fill * kTileBytes, frame + n, tile * kKeys, ld);
        copies.template fetch<kKeys>(v_at + fill * kTileBytes, frame + 2 * n, tile * kKeys, ld);
        arrive_after_copies(full + fill * 8);
        if (++fill == kStages) fill = 0, fill_parity ^= 1;
    };
    fetch(0);

    const u32 k_lane = k_at + 2 * ((lane % 8 + lane / 16 * 8) * H::kStride + lane / 8 % 2 * kChunk);
    const u32 v_lane = v_at + 2 * (lane % 16 * H::kStride + lane / 16 * kChunk);
    // The lane's rows are lane / 4 and eight below it.
    float out[H::kTiles][4], row_max[2] = {minus_infinity(), minus_infinity()}, row_sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int t = 0; t < H::kTiles; ++t) out[t][0] = out[t][1] = out[t][2] = out[t][3] = 0.0f;

    for (int tile = 0; tile < num_tiles; ++tile) {
        fetch(tile + 1);
        wait_barrier(full + use * 8, use_parity);
        const u32 keys = k_lane + use * kTileBytes, values = v_lane + use * kTileBytes;

        float scores[kKeys / 8][4];
#pragma unroll
        for (int step = 0; step < H::kSteps; ++step)
#pragma unroll
            for (int t = 0; t < kKeys / 8; t += 2) {
                u32 key[4];
                load_tiles(key, keys + 2 * (t * 8 * H::kStride + step * 2 * kChunk));
                if (step == 0) {
                    mma_bf16_first(scores[t], q[step], key[0], key[1]);
                    mma_bf16_first(scores[t + 1], q[step], key[2], key[3]);
                } else {
                    mma_bf16(scores[t], q[step], key[0], key[1]);
                    mma_bf16(scores[t + 1], q[step], key[2], key[3]);
                }
            }
        const int num_left = frame_rows - tile * kKeys;
        if (num_left < kKeys) {
#pragma unroll
            for (int t = 0; t < kKeys / 8; ++t)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (t * 8 + lane % 4 * 2 + c % 2 >= num_left) scores[t][c] = minus_infinity();
        }

        float top[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float x = row_max[h];
#pragma unroll
            for (int t = 0; t < kKeys / 8; ++t) x = fmaxf(x, fmaxf(scores[t][2 * h], scores[t][2 * h + 1]));
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
            top[h] = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
        }
        // A maximum that stays would only multiply by one.
        if (__any_sync(0xffffffffu, top[0] > row_max[0] || top[1] > row_max[1])) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float keep = exp2_fast(mul_rn(sub_rn(row_max[h], top[h]), scale_log2));
                row_max[h] = top[h];
                row_sum[h] = mul_rn(row_sum[h], keep);
#pragma unroll
                for (int t = 0; t < H::kTiles; ++t) {
                    out[t][2 * h] = mul_rn(out[t][2 * h], keep);
                    out[t][2 * h + 1] = mul_rn(out[t][2 * h + 1], keep);
                }
            }
        }
        const float shift[2] = {-mul_rn(row_max[0], scale_log2), -mul_rn(row_max[1], scale_log2)};
        // Exponentials of the next slots have nothing to do with the mma of these.
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
            u32 weights[4];
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    const float* pair = scores[2 * step + t] + 2 * h;
                    const float first = exp2_fast(fma_rn(pair[0], scale_log2, shift[h]));
                    const float second = exp2_fast(fma_rn(pair[1], scale_log2, shift[h]));
                    row_sum[h] = add_rn(row_sum[h], add_rn(first, second));
                    weights[2 * t + h] = pack_bf16(first, second);
                }
#pragma unroll
            for (int t = 0; t < H::kTiles; t += 2) {
                u32 value[4];
                load_tiles_transposed(value, values + 2 * (step * 16 * H::kStride + t * kChunk));
                mma_bf16(out[t], weights, value[0], value[1]);
                if (t + 1 < H::kTiles) mma_bf16(out[t + 1], weights, value[2], value[3]);
            }
        }
        __syncwarp();
        if (lane == 0) arrive(empty + use * 8);
        if (++use == kStages) use = 0, use_parity ^= 1;
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = row_sum[h];
        sum = add_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = add_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        const int query = first_query + warp * 16 + h * 8 + lane / 4;
        if (query >= frame_rows) continue;
        const float share = div_rn(1.0f, sum);
        u16* row = out_mn + ((i64)blockIdx.z * frame_rows + query) * n + blockIdx.y * kHeadDim + lane % 4 * 2;
#pragma unroll
        for (int t = 0; t < H::kTiles; ++t)
            *(u32*)(row + t * 8) = pack_bf16(mul_rn(out[t][2 * h], share), mul_rn(out[t][2 * h + 1], share));
    }
}

// Two blocks a multiprocessor, of as many warps as their registers allow.
#define ATTEND_PATCHES(HEAD_DIM, WARPS)                                                                              \
    extern "C" __global__ void __launch_bounds__(WARPS * kWarp, 2)                                                   \
    attend_patches_##HEAD_DIM(const u16* qkv_mn, u16* out_mn, int frame_rows, int num_heads, float scale_log2) {     \
        attend_patches<HEAD_DIM, WARPS>(qkv_mn, out_mn, frame_rows, num_heads, scale_log2);                          \
    }
ATTEND_PATCHES(16, 8)
ATTEND_PATCHES(32, 8)
ATTEND_PATCHES(64, 8)
ATTEND_PATCHES(72, 6)
ATTEND_PATCHES(80, 6)
ATTEND_PATCHES(128, 4)

constexpr int kFloatWarps = 4;
constexpr int kFloatThreads = kFloatWarps * kWarp;
constexpr int kFloatQueries = 4;               // of a warp
constexpr int kFloatKeys = kWarp;
constexpr int kFloatHeadDim = 128;             // the widest
constexpr int kFloatSlices = kFloatHeadDim / kWarp;

// The same in float32 for any head of up to 128 channels. A lane has one of 32 keys for the scores, and every 32nd
// channel for the values. Grid: (ceil(frame_rows / 16), heads, frames).
extern "C" __global__ void __launch_bounds__(kFloatThreads)
attend_patches_f32(const float* qkv_mn, float* out_mn, int frame_rows, int num_heads, int head_dim, float scale_log2) {
    __shared__ float tile[kFloatKeys][kFloatHeadDim + 1], queries[kFloatWarps * kFloatQueries][kFloatHeadDim];
    const int n = num_heads * head_dim, ld = 3 * n;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int first_query = (blockIdx.x * kFloatWarps + warp) * kFloatQueries;
    const float* frame = qkv_mn + (i64)blockIdx.z * frame_rows * ld + blockIdx.y * head_dim;

    for (int i = 0; i < kFloatQueries; ++i)
        for (int d = lane; d < head_dim; d += kWarp)
            queries[warp * kFloatQueries + i][d] =
                first_query + i < frame_rows ? frame[(i64)(first_query + i) * ld + d] : 0.0f;

    float out[kFloatQueries][kFloatSlices] = {}, row_max[kFloatQueries], row_sum[kFloatQueries];
#pragma unroll
    for (int i = 0; i < kFloatQueries; ++i) row_max[i] = minus_infinity(), row_sum[i] = 0.0f;

    const auto load = [&](const float* from, int first) {
        __syncthreads();
        for (int at = threadIdx.x; at < kFloatKeys * head_dim; at += kFloatThreads) {
            const int row = at / head_dim, d = at % head_dim;
            tile[row][d] = first + row < frame_rows ? from[(i64)(first + row) * ld + d] : 0.0f;
        }
        __syncthreads();
    };
    for (int first = 0; first < frame_rows; first += kFloatKeys) {
        load(frame + n, first);
        float weights[kFloatQueries];
#pragma unroll
        for (int i = 0; i < kFloatQueries; ++i) weights[i] = 0.0f;
        for (int d = 0; d < head_dim; ++d) {
            const float key = tile[lane][d];
#pragma unroll
            for (int i = 0; i < kFloatQueries; ++i)
                weights[i] = fma_rn(queries[warp * kFloatQueries + i][d], key, weights[i]);
        }
#pragma unroll
        for (int i = 0; i < kFloatQueries; ++i) {
            const float score = first + lane < frame_rows ? mul_rn(weights[i], scale_log2) : minus_infinity();
            const float top = fmaxf(row_max[i], warp_max(score));
            const float keep = exp2f(sub_rn(row_max[i], top));
            weights[i] = exp2f(sub_rn(score, top));
            row_max[i] = top;
            row_sum[i] = add_rn(mul_rn(row_sum[i], keep), weights[i]);
#pragma unroll
            for (int c = 0; c < kFloatSlices; ++c) out[i][c] = mul_rn(out[i][c], keep);
        }
        load(frame + 2 * n, first);
        for (int key = 0; key < kFloatKeys; ++key) {
            float weight[kFloatQueries];
#pragma unroll
            for (int i = 0; i < kFloatQueries; ++i) weight[i] = __shfl_sync(0xffffffffu, weights[i], key);
#pragma unroll
            for (int c = 0; c < kFloatSlices; ++c) {
                const int d = c * kWarp + lane;
                const float value = d < head_dim ? tile[key][d] : 0.0f;
#pragma unroll
                for (int i = 0; i < kFloatQueries; ++i) out[i][c] = fma_rn(weight[i], value, out[i][c]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kFloatQueries; ++i) {
        const float sum = warp_sum(row_sum[i]);
        if (first_query + i >= frame_rows) continue;
        float* row = out_mn + ((i64)blockIdx.z * frame_rows + first_query + i) * n + blockIdx.y * head_dim;
#pragma unroll
        for (int c = 0; c < kFloatSlices; ++c)
            if (c * kWarp + lane < head_dim) row[c * kWarp + lane] = div_rn(out[i][c], sum);
    }
}
