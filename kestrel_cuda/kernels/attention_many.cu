// Causal grouped-query attention over a float16 cache for many queries: a block walks all splits for 64 of them.
// attention_half.cuh has the sums and why a query's result does not depend on which kernel made it.

#include "common.cuh"
#include "attention_half.cuh"

// Many queries: a block takes 64 (query, head) rows of one kv head and walks the splits, merging as it goes; a pair of
// warps shares 16 rows: half of a split's slots each for the scores, half of the channels each for the values.
// Row r is query r / queries_per_kv of the block's tile, head r % queries_per_kv. Grid: (ceil(m / queries), kv_heads).
constexpr int kTileRows = 64;

template <int kHeadDim>
struct ManyRows {
    static constexpr int kKeyStride = kHeadDim + (kHeadDim == 32 ? 0 : 32);  // halves; free of bank conflicts
    static constexpr int kValueStride = kHeadDim + 8;
    u16 queries[kTileRows * Shape<kHeadDim>::kQueryStride];
    u16 weights[kTileRows * kWeightStride];
    union {
        u16 keys[2][kSubtile * kKeyStride];
        u16 values[kSubtile * kValueStride];
    };
    float maxima[2][kTileRows];
};

template <int kHeadDim>
__device__ inline void attend_tiled(const float* q_mhd, const u16* k_hsd, const u16* v_hsd, const int* position, float* out_mhd,
                                    int queries_per_kv, int m, int ctx, float scale) {
    using S = Shape<kHeadDim>;
    using Tile = ManyRows<kHeadDim>;
    extern __shared__ __align__(16) unsigned char bytes[];
    Tile& shared = *(Tile*)bytes;
    const int kv_head = blockIdx.y, num_heads = gridDim.y * queries_per_kv;
    const int tile_queries = kTileRows / queries_per_kv;
    const int first_query = blockIdx.x * tile_queries;
    const int num_rows = min(tile_queries, m - first_query) * queries_per_kv;
    const int start = *position + first_query;
    const int last = start + (num_rows - 1) / queries_per_kv;
    const u16* k_sd = k_hsd + (i64)kv_head * ctx * kHeadDim;
    const u16* v_sd = v_hsd + (i64)kv_head * ctx * kHeadDim;
    const int warp = threadIdx.x / kWarp, quad = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
    const int first_row = warp / 2 * kMmaRows, half = warp % 2;

    for (int i = threadIdx.x; i < kTileRows * kHeadDim; i += kAttentionThreads) {
        const int r = i / kHeadDim, d = i % kHeadDim;
        const i64 head = (i64)(first_query + r / queries_per_kv) * num_heads + kv_head * queries_per_kv + r % queries_per_kv;
        shared.queries[r * S::kQueryStride + d] = r < num_rows ? float_to_half(q_mhd[head * kHeadDim + d]) : (u16)0;
    }
    int last_slot[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = first_row + quad + 8 * h;
        last_slot[h] = r < num_rows ? start + r / queries_per_kv : -1;
    }

    constexpr int kVector = 8;
    auto load_tile = [&](u16* tile, int stride, const u16* from, int slot0) {
        for (int i = threadIdx.x; i < kSubtile * kHeadDim / kVector; i += kAttentionThreads) {
            const int s = i / (kHeadDim / kVector), d = i % (kHeadDim / kVector) * kVector;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (slot0 + s <= last) value = *(const uint4*)(from + (i64)(slot0 + s) * kHeadDim + d);
            *(uint4*)&tile[s * stride + d] = value;
        }
    };

    float running_max[2] = {minus_infinity(), minus_infinity()}, running_sum[2] = {0.0f, 0.0f};
    float out[S::kValueHalves][4];
#pragma unroll
    for (int t = 0; t < S::kValueHalves; ++t) out[t][0] = out[t][1] = out[t][2] = out[t][3] = 0.0f;

    for (int first_slot = 0; first_slot <= last; first_slot += kSplit) {
        float scores[16][4];
#pragma unroll
        for (int round = 0; round < 2; ++round) {
            __syncthreads();
            load_tile(shared.keys[0], Tile::kKeyStride, k_sd, first_slot + round * kSubtile);
            load_tile(shared.keys[1], Tile::kKeyStride, k_sd, first_slot + kSplit / 2 + round * kSubtile);
            __syncthreads();
            u32 q[S::kSteps][4];
            load_queries<kHeadDim>(q, shared.queries + first_row * S::kQueryStride);
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                Run<S::kKeyHalves> key[S::kKeyRuns];
                const u16* row = shared.keys[half] + (t * 8 + quad) * Tile::kKeyStride;
#pragma unroll
                for (int run = 0; run < S::kKeyRuns; ++run) key[run].load(row + (run * 4 + j) * S::kKeyHalves);
                float* tile = scores[round * 8 + t];
                float dots[4];
                score_tile<kHeadDim>(dots, q, key);
                const int slot = first_slot + half * (kSplit / 2) + round * kSubtile + t * 8 + 2 * j;
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    tile[c] = slot + c % 2 <= last_slot[c / 2] ? mul_rn(dots[c], scale) : minus_infinity();
            }
        }
        float row_max[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
        for (int t = 0; t < 16; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) row_max[c / 2] = fmaxf(row_max[c / 2], scores[t][c]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row_max[h] = quad_max(row_max[h]);
            if (j == 0) shared.maxima[half][first_row + quad + 8 * h] = row_max[h];
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) row_max[h] = fmaxf(row_max[h], shared.maxima[1 - half][first_row + quad + 8 * h]);
#pragma unroll
        for (int t = 0; t < 16; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float p[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float s = scores[t][2 * h + c];
                    p[c] = s == minus_infinity() ? 0.0f : exp2_fast(sub_rn(s, row_max[h]));
                }
                *(u32*)&shared.weights[(first_row + quad + 8 * h) * kWeightStride + half * (kSplit / 2) + t * 8 + 2 * j] =
                    pack_halves(p[0], p[1]);
            }
        float keep[2], take[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float merged_max;
            merge_weights(running_max[h], row_max[h], keep[h], take[h], merged_max);
            running_max[h] = merged_max;
        }
        float split_out[S::kValueHalves][4], split_sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < S::kValueHalves; ++t) split_out[t][0] = split_out[t][1] = split_out[t][2] = split_out[t][3] = 0.0f;
        for (int subtile = 0; subtile < kSubtiles; ++subtile) {
            const int slot0 = first_slot + subtile * kSubtile;
            if (slot0 > last) break;
            __syncthreads();
            load_tile(shared.values, Tile::kValueStride, v_sd, slot0);
            __syncthreads();
            float acc[S::kValueHalves][4], sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int t = 0; t < S::kValueHalves; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0f;
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                u32 weights[4];
                load_weights(weights, shared.weights + first_row * kWeightStride, subtile * kSubtile + step * 16);
                Run<S::kValueHalves> values[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int s = step * 16 + 2 * j + i % 2 + i / 2 * 8;
                    values[i].load(shared.values + s * Tile::kValueStride + half * (kHeadDim / 2) + quad * S::kValueHalves);
                }
                add_values<kHeadDim>(acc, sums, weights, values);
            }
#pragma unroll
            for (int t = 0; t < S::kValueHalves; ++t)
#pragma unroll
                for (int c = 0; c < 4; ++c) split_out[t][c] = add_rn(split_out[t][c], acc[t][c]);
            split_sum[0] = add_rn(split_sum[0], sums[0]);
            split_sum[1] = add_rn(split_sum[1], sums[2]);
        }
#pragma unroll
        for (int t = 0; t < S::kValueHalves; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) out[t][c] = merge(out[t][c], keep[c / 2], split_out[t][c], take[c / 2]);
#pragma unroll
        for (int h = 0; h < 2; ++h) running_sum[h] = merge(running_sum[h], keep[h], split_sum[h], take[h]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const int r = first_row + quad + c / 2 * 8;
        if (r >= num_rows) continue;
        const i64 head = (i64)(first_query + r / queries_per_kv) * num_heads + kv_head * queries_per_kv + r % queries_per_kv;
        float* to = out_mhd + head * kHeadDim + half * (kHeadDim / 2) + (2 * j + c % 2) * S::kValueHalves;
#pragma unroll
        for (int t = 0; t < S::kValueHalves; ++t) to[t] = div_rn(out[t][c], running_sum[c / 2]);
    }
}

#define ATTEND(SUFFIX, HEAD_DIM)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kAttentionThreads, 1)                                               \
    attend_tiled_##SUFFIX(const float* q_mhd, const u16* k_hsd, const u16* v_hsd, const int* position,               \
                          float* out_mhd, int queries_per_kv, int m, int ctx, float scale) {                         \
        attend_tiled<HEAD_DIM>(q_mhd, k_hsd, v_hsd, position, out_mhd, queries_per_kv, m, ctx, scale);               \
    }

ATTEND(f16_16, 16)
ATTEND(f16_32, 32)
ATTEND(f16_64, 64)
ATTEND(f16_128, 128)
