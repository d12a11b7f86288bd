// Full attention of the patches of a frame over one another, softmax(q k^T / sqrt(d)) v, rotated queries and keys.
//
// A row of qkv_mn holds queries, keys and values of all heads, in this order. Keys are taken 64 or 32 at a time, so memory is
// linear in the number of patches; a running maximum and sum are kept for each query, in an order that depends on the
// frame's size alone.
//
// bfloat16: a warp has 32 queries of one head (16 where their sums would not fit the registers), whose weights go from
// the scores' registers straight into the values' mma. Keys and values of the next patches are on their way while
// these are used.

#include "common.cuh"
#include "vision.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kStages = 2;
constexpr int kChunk = 8;                                                // values of a copy of 16 bytes

template <int kHeadDim>
struct Heads {
    static constexpr int kSteps = (kHeadDim + 15) / 16;                  // mma steps of a score
    static constexpr int kTiles = kHeadDim / 8;                          // mma columns of the values
    static constexpr int kTileRows = kHeadDim <= 80 ? 2 : 1;             // of 16 queries each, a warp's
    static constexpr int kQueries = kWarps * kTileRows * 16;             // of a block
    static constexpr int kKeys = kHeadDim == 72 || kHeadDim == 80 ? 32 : 64;  // at a time
    static constexpr int kUsedChunks = kHeadDim / kChunk;
    // Whole steps, and odd, so that the same chunk of eight rows meets in no bank.
    static constexpr int kRowChunks = kSteps * 2 + 1;
    static constexpr int kStride = kRowChunks * kChunk;
};

// Copy `kRows` rows of a head into shared memory; rows past the end, and channels past the head's, read as zero.
template <int kHeadDim, int kRows>
__device__ inline void fetch_rows(u16* tile, const u16* from, int first, int num_rows, int ld) {
    using H = Heads<kHeadDim>;
    constexpr int kChunks = H::kSteps * 2;
#pragma unroll 1
    for (int at = threadIdx.x; at < kRows * kChunks; at += kThreads) {
        const int row = at / kChunks, chunk = at % kChunks;
        const bool valid = first + row < num_rows && chunk < H::kUsedChunks;
        copy_async_16(tile + row * H::kStride + chunk * kChunk,
                      valid ? from + (i64)(first + row) * ld + chunk * kChunk : from, valid);
    }
}

template <int kHeadDim>
struct Tiles {
    using H = Heads<kHeadDim>;
    u16 k[kStages][H::kKeys * H::kStride];
    u16 v[kStages][H::kKeys * H::kStride];
};

// Grid: (ceil(frame_rows / kQueries), heads, frames). Dynamic shared memory: Tiles, which has the queries first.
template <int kHeadDim>
__device__ inline void attend_patches(const u16* qkv_mn, u16* out_mn, int frame_rows, int num_heads, float scale_log2) {
    using H = Heads<kHeadDim>;
    constexpr int kM = H::kTileRows, kKeys = H::kKeys;
    extern __shared__ __align__(128) unsigned char bytes[];
    Tiles<kHeadDim>& shared = *(Tiles<kHeadDim>*)bytes;
    const int n = num_heads * kHeadDim, ld = 3 * n;
    const int first_query = blockIdx.x * H::kQueries;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const u16* frame = qkv_mn + (i64)blockIdx.z * frame_rows * ld + blockIdx.y * kHeadDim;
    const int num_tiles = (frame_rows + kKeys - 1) / kKeys;

    u16* queries = shared.k[0];
    static_assert(sizeof(Tiles<kHeadDim>) >= H::kQueries * H::kStride * sizeof(u16), "queries fit");
    fetch_rows<kHeadDim, H::kQueries>(queries, frame, first_query, frame_rows, ld);
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;");
    __syncthreads();
    u32 q[kM][H::kSteps][4];
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int step = 0; step < H::kSteps; ++step)
            load_tiles(q[i][step], queries + ((warp * kM + i) * 16 + lane % 16) * H::kStride +
                                       (step * 2 + lane / 16) * kChunk);
    __syncthreads();

    const auto fetch = [&](int tile) {
        if (tile < num_tiles) {
            fetch_rows<kHeadDim, kKeys>(shared.k[tile % kStages], frame + n, tile * kKeys, frame_rows, ld);
            fetch_rows<kHeadDim, kKeys>(shared.v[tile % kStages], frame + 2 * n, tile * kKeys, frame_rows, ld);
        }
        asm volatile("cp.async.commit_group;");
    };
    fetch(0);

    float out[kM][H::kTiles][4], row_max[kM][2], row_sum[kM][2];
#pragma unroll
    for (int i = 0; i < kM; ++i) {
        row_max[i][0] = row_max[i][1] = minus_infinity();
        row_sum[i][0] = row_sum[i][1] = 0.0f;
#pragma unroll
        for (int t = 0; t < H::kTiles; ++t) out[i][t][0] = out[i][t][1] = out[i][t][2] = out[i][t][3] = 0.0f;
    }

    for (int tile = 0; tile < num_tiles; ++tile) {
        asm volatile("cp.async.wait_group 0;");
        __syncthreads();
        fetch(tile + 1);
        const u16 *keys = shared.k[tile % kStages], *values = shared.v[tile % kStages];

        float scores[kM][kKeys / 8][4];
#pragma unroll
        for (int i = 0; i < kM; ++i)
#pragma unroll
            for (int t = 0; t < kKeys / 8; ++t)
                scores[i][t][0] = scores[i][t][1] = scores[i][t][2] = scores[i][t][3] = 0.0f;
#pragma unroll
        for (int step = 0; step < H::kSteps; ++step)
#pragma unroll
            for (int t = 0; t < kKeys / 8; t += 2) {
                u32 key[4];
                load_tiles(key, keys + (t * 8 + lane % 8 + lane / 16 * 8) * H::kStride +
                                    (step * 2 + lane / 8 % 2) * kChunk);
#pragma unroll
                for (int i = 0; i < kM; ++i) {
                    mma_bf16(scores[i][t], q[i][step], key[0], key[1]);
                    mma_bf16(scores[i][t + 1], q[i][step], key[2], key[3]);
                }
            }
        const int num_left = frame_rows - tile * kKeys;
        if (num_left < kKeys) {
#pragma unroll
            for (int t = 0; t < kKeys / 8; ++t)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (t * 8 + lane % 4 * 2 + c % 2 >= num_left)
#pragma unroll
                        for (int i = 0; i < kM; ++i) scores[i][t][c] = minus_infinity();
        }

        float top[kM][2];
        bool grows = false;
#pragma unroll
        for (int i = 0; i < kM; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float x = row_max[i][h];
#pragma unroll
                for (int t = 0; t < kKeys / 8; ++t) x = fmaxf(x, fmaxf(scores[i][t][2 * h], scores[i][t][2 * h + 1]));
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
                top[i][h] = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
                grows |= top[i][h] > row_max[i][h];
            }
        // A maximum that stays would only multiply by one.
        if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
            for (int i = 0; i < kM; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float keep = exp2_fast(mul_rn(sub_rn(row_max[i][h], top[i][h]), scale_log2));
                    row_max[i][h] = top[i][h];
                    row_sum[i][h] = mul_rn(row_sum[i][h], keep);
#pragma unroll
                    for (int t = 0; t < H::kTiles; ++t) {
                        out[i][t][2 * h] = mul_rn(out[i][t][2 * h], keep);
                        out[i][t][2 * h + 1] = mul_rn(out[i][t][2 * h + 1], keep);
                    }
                }
        }
        u32 weights[kM][kKeys / 16][4];
#pragma unroll
        for (int i = 0; i < kM; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float shift = -mul_rn(row_max[i][h], scale_log2);
#pragma unroll
                for (int t = 0; t < kKeys / 8; ++t) {
                    const float first = exp2_fast(fma_rn(scores[i][t][2 * h], scale_log2, shift));
                    const float second = exp2_fast(fma_rn(scores[i][t][2 * h + 1], scale_log2, shift));
                    row_sum[i][h] = add_rn(row_sum[i][h], add_rn(first, second));
                    weights[i][t / 2][t % 2 * 2 + h] = pack_bf16(first, second);
                }
            }
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
            for (int t = 0; t < H::kTiles; t += 2) {
                u32 value[4];
                load_tiles_transposed(value, values + (step * 16 + lane % 16) * H::kStride + (t + lane / 16) * kChunk);
#pragma unroll
                for (int i = 0; i < kM; ++i) {
                    mma_bf16(out[i][t], weights[i][step], value[0], value[1]);
                    if (t + 1 < H::kTiles) mma_bf16(out[i][t + 1], weights[i][step], value[2], value[3]);
                }
            }
    }

#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = row_sum[i][h];
            sum = add_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
            sum = add_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
            const int query = first_query + (warp * kM + i) * 16 + h * 8 + lane / 4;
            if (query >= frame_rows) continue;
            const float share = div_rn(1.0f, sum);
            u16* row = out_mn + ((i64)blockIdx.z * frame_rows + query) * n + blockIdx.y * kHeadDim + lane % 4 * 2;
#pragma unroll
            for (int t = 0; t < H::kTiles; ++t)
                *(u32*)(row + t * 8) = pack_bf16(mul_rn(out[i][t][2 * h], share), mul_rn(out[i][t][2 * h + 1], share));
        }
}

#define ATTEND_PATCHES(HEAD_DIM)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                        \
    attend_patches_##HEAD_DIM(const u16* qkv_mn, u16* out_mn, int frame_rows, int num_heads, float scale_log2) {     \
        attend_patches<HEAD_DIM>(qkv_mn, out_mn, frame_rows, num_heads, scale_log2);                                 \
    }
ATTEND_PATCHES(16)
ATTEND_PATCHES(32)
ATTEND_PATCHES(64)
ATTEND_PATCHES(72)
ATTEND_PATCHES(80)
ATTEND_PATCHES(128)

constexpr int kFloatQueries = 4;               // of a warp
constexpr int kFloatKeys = kWarp;
constexpr int kFloatHeadDim = 128;             // the widest
constexpr int kFloatSlices = kFloatHeadDim / kWarp;

// The same in float32 for any head of up to 128 channels. A lane has one of 32 keys for the scores, and every 32nd
// channel for the values. Grid: (ceil(frame_rows / 16), heads, frames).
extern "C" __global__ void __launch_bounds__(kThreads)
attend_patches_f32(const float* qkv_mn, float* out_mn, int frame_rows, int num_heads, int head_dim, float scale_log2) {
    __shared__ float tile[kFloatKeys][kFloatHeadDim + 1], queries[kWarps * kFloatQueries][kFloatHeadDim];
    const int n = num_heads * head_dim, ld = 3 * n;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int first_query = (blockIdx.x * kWarps + warp) * kFloatQueries;
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
        for (int at = threadIdx.x; at < kFloatKeys * head_dim; at += kThreads) {
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
