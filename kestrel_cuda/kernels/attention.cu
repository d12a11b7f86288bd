// Causal grouped-query attention over a float32 key-value cache, in float32 throughout, for any number of queries, in
// memory linear in length. attention_half.cuh is its counterpart for float16 caches.
//
// The sums are fixed by cache position alone. The cache is cut into splits of 256 slots; inside a split, for one query
// and head: scores q.k by fma over the head's channels in ascending order, times the scale; the split's maximum; the
// sum of exponentials in a fixed tree; the weighted values by fma over slots in ascending order inside subtiles of 64,
// subtiles added in ascending order. Splits are merged in ascending order. Both kernels below do exactly this, so a
// query's result does not depend on how many queries came with it. Scores are in units of log2, so exponentials are
// powers of two.

#include "common.cuh"

__device__ inline float4 load4(const float* p) { return *(const float4*)p; }
__device__ inline float load1(const float* p) { return *p; }

__device__ inline float fma4(float4 a, float4 b, float acc) {
    return fma_rn(a.w, b.w, fma_rn(a.z, b.z, fma_rn(a.y, b.y, fma_rn(a.x, b.x, acc))));
}

// One warp turns a row of 256 scores into exponentials in place and returns the row's maximum and sum.
// The row has at least one score that is not masked, or its maximum is minus infinity and everything becomes 0.
__device__ inline void split_softmax(float* scores_s, float& row_max, float& row_sum) {
    const int lane = threadIdx.x % kWarp;
    float largest = minus_infinity();
    for (int s = lane; s < kSplit; s += kWarp) largest = fmaxf(largest, scores_s[s]);
    row_max = warp_max(largest);
    float sum = 0.0f;
    for (int s = lane; s < kSplit; s += kWarp) {
        const float p = scores_s[s] == minus_infinity() ? 0.0f : exp2_fast(sub_rn(scores_s[s], row_max));
        scores_s[s] = p;
        sum = add_rn(sum, p);
    }
    row_sum = warp_sum(sum);
}

// Few queries: one block a (split, kv head, query) writes that split's maximum, sum and weighted values.
// q_mhd [m][heads][d]; k_hsd, v_hsd [kv_heads][ctx][d]; max_mhs, sum_mhs [m][heads][splits]; out_mhsd [..][splits][d].
// Grid: (splits, kv_heads, m). Dynamic shared memory: queries_per_kv * (d + 256) + 512 floats.
template <typename Cache, int kHeadDim>
__device__ inline void attend_split(const float* q_mhd, const Cache* k_hsd, const Cache* v_hsd, const int* position,
                                    float* max_mhs, float* sum_mhs, float* out_mhsd, int queries_per_kv, int ctx,
                                    float scale) {
    extern __shared__ __align__(16) float shared_floats[];
    const int split = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
    const int num_splits = gridDim.x, num_heads = gridDim.y * queries_per_kv;
    const int last = *position + row;
    const int first_slot = split * kSplit;
    if (first_slot > last) return;
    const int num_slots = min(kSplit, last + 1 - first_slot);
    float* q = shared_floats;
    float* scores = q + queries_per_kv * kHeadDim;
    float* partial = scores + queries_per_kv * kSplit;

    const float* q_row = q_mhd + ((i64)row * num_heads + kv_head * queries_per_kv) * kHeadDim;
    for (int i = threadIdx.x; i < queries_per_kv * kHeadDim; i += kAttentionThreads) q[i] = q_row[i];
    __syncthreads();

    const Cache* k = k_hsd + ((i64)kv_head * ctx + first_slot) * kHeadDim;
    const Cache* v = v_hsd + ((i64)kv_head * ctx + first_slot) * kHeadDim;
    for (int first = 0; first < queries_per_kv; first += 2) {
        float dot[2] = {0.0f, 0.0f};
        const int second = min(first + 1, queries_per_kv - 1);
        if (threadIdx.x < num_slots) {
#pragma unroll 8
            for (int d = 0; d < kHeadDim; d += 4) {
                const float4 key = load4(k + (i64)threadIdx.x * kHeadDim + d);
                dot[0] = fma4(*(const float4*)&q[first * kHeadDim + d], key, dot[0]);
                dot[1] = fma4(*(const float4*)&q[second * kHeadDim + d], key, dot[1]);
            }
        }
        scores[first * kSplit + threadIdx.x] = threadIdx.x < num_slots ? mul_rn(dot[0], scale) : minus_infinity();
        if (second != first)
            scores[second * kSplit + threadIdx.x] = threadIdx.x < num_slots ? mul_rn(dot[1], scale) : minus_infinity();
    }
    __syncthreads();
    for (int h = threadIdx.x / kWarp; h < queries_per_kv; h += kAttentionWarps) {
        float row_max, row_sum;
        split_softmax(scores + h * kSplit, row_max, row_sum);
        if (threadIdx.x % kWarp == 0) {
            const i64 at = ((i64)row * num_heads + kv_head * queries_per_kv + h) * num_splits + split;
            max_mhs[at] = row_max;
            sum_mhs[at] = row_sum;
        }
    }
    __syncthreads();

    // Values: two channels a thread, one subtile a thread, as many heads at a time as fit the block.
    constexpr int kPairs = kHeadDim / 2;
    constexpr int kHeadsAtOnce = kAttentionThreads / (kPairs * kSubtiles);
    const int pair = threadIdx.x % kPairs;
    const int subtile = threadIdx.x / kPairs % kSubtiles;
    const int local = threadIdx.x / (kPairs * kSubtiles);
    for (int first = 0; first < queries_per_kv; first += kHeadsAtOnce) {
        const int h = first + local;
        float acc[2] = {0.0f, 0.0f};
        if (h < queries_per_kv) {
            const int end = min(num_slots, (subtile + 1) * kSubtile);
#pragma unroll 8
            for (int s = subtile * kSubtile; s < end; ++s) {
                const float p = scores[h * kSplit + s];
                acc[0] = fma_rn(p, load1(v + (i64)s * kHeadDim + 2 * pair), acc[0]);
                acc[1] = fma_rn(p, load1(v + (i64)s * kHeadDim + 2 * pair + 1), acc[1]);
            }
        }
        float* mine = partial + (local * kSubtiles + subtile) * kHeadDim + 2 * pair;
        mine[0] = acc[0], mine[1] = acc[1];
        __syncthreads();
        if (subtile == 0 && h < queries_per_kv) {
            float* out = out_mhsd + (((i64)row * num_heads + kv_head * queries_per_kv + h) * num_splits + split) * kHeadDim;
            for (int c = 0; c < 2; ++c) {
                float total = 0.0f;
                for (int t = 0; t < kSubtiles; ++t)
                    total = add_rn(total, partial[(local * kSubtiles + t) * kHeadDim + 2 * pair + c]);
                out[2 * pair + c] = total;
            }
        }
        __syncthreads();
    }
}

// Many queries: one block takes 32 (query, head) rows of one kv head and walks the splits, merging as it goes.
// Row r is query r / queries_per_kv of the block's tile, head r % queries_per_kv. Grid: (ceil(m / queries), kv_heads).
constexpr int kRows = 32;
constexpr int kScoreStride = kSplit + 4;

template <typename Cache, int kHeadDim>
__device__ inline void attend_tiled(const float* q_mhd, const Cache* k_hsd, const Cache* v_hsd, const int* position,
                                    float* out_mhd, int queries_per_kv, int m, int ctx, float scale) {
    constexpr int kStride = kHeadDim + 16 / (int)sizeof(Cache);
    constexpr int kQueryStride = kHeadDim + 4;
    extern __shared__ __align__(16) float shared_floats[];
    float* q = shared_floats;
    float* scores = q + kRows * kQueryStride;
    float* row_stats = scores + kRows * kScoreStride;
    float* running_max = row_stats;
    float* running_sum = row_stats + kRows;
    float* keep = row_stats + 2 * kRows;
    float* take = row_stats + 3 * kRows;
    Cache* tile = (Cache*)(row_stats + 4 * kRows);

    const int kv_head = blockIdx.y, num_heads = gridDim.y * queries_per_kv;
    const int tile_queries = kRows / queries_per_kv;
    const int first_query = blockIdx.x * tile_queries;
    const int num_queries = min(tile_queries, m - first_query);
    const int num_rows = num_queries * queries_per_kv;
    const int start = *position;
    const int last = start + first_query + num_queries - 1;

    for (int i = threadIdx.x; i < kRows * kHeadDim; i += kAttentionThreads) {
        const int r = i / kHeadDim, d = i % kHeadDim;
        const int query = first_query + r / queries_per_kv, head = kv_head * queries_per_kv + r % queries_per_kv;
        q[r * kQueryStride + d] = r < num_rows ? q_mhd[((i64)query * num_heads + head) * kHeadDim + d] : 0.0f;
    }
    if (threadIdx.x < kRows) {
        running_max[threadIdx.x] = minus_infinity();
        running_sum[threadIdx.x] = 0.0f;
    }

    // Thread (row group, column) owns rows 4 * group .. + 3: slots column, column + 32 of a subtile, then channels
    // 4 * column .. + 3 of the output.
    const int group = threadIdx.x / kWarp, column = threadIdx.x % kWarp;
    const bool has_channels = 4 * column < kHeadDim;
    float out[4][4];
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) out[r][c] = 0.0f;

    auto load_tile = [&](const Cache* from, int first_slot) {
        constexpr int kVector = 16 / (int)sizeof(Cache);
        for (int i = threadIdx.x; i < kSubtile * kHeadDim / kVector; i += kAttentionThreads) {
            const int s = i / (kHeadDim / kVector), d = i % (kHeadDim / kVector) * kVector;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (first_slot + s <= last) value = *(const uint4*)(from + (i64)(first_slot + s) * kHeadDim + d);
            *(uint4*)&tile[s * kStride + d] = value;
        }
    };

    for (int first_slot = 0; first_slot <= last; first_slot += kSplit) {
        for (int t = 0; t < kSubtiles; ++t) {
            const int slot0 = first_slot + t * kSubtile;
            __syncthreads();
            if (slot0 <= last) load_tile(k_hsd + (i64)kv_head * ctx * kHeadDim, slot0);
            __syncthreads();
            float dot[4][2];
#pragma unroll
            for (int r = 0; r < 4; ++r) dot[r][0] = dot[r][1] = 0.0f;
            if (slot0 <= last) {
#pragma unroll 4
                for (int d = 0; d < kHeadDim; d += 4) {
                    const float4 key0 = load4(&tile[column * kStride + d]);
                    const float4 key1 = load4(&tile[(column + kWarp) * kStride + d]);
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const float4 query = *(const float4*)&q[(4 * group + r) * kQueryStride + d];
                        dot[r][0] = fma4(query, key0, dot[r][0]);
                        dot[r][1] = fma4(query, key1, dot[r][1]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int query_slot = start + first_query + (4 * group + r) / queries_per_kv;
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int s = column + c * kWarp;
                    scores[(4 * group + r) * kScoreStride + t * kSubtile + s] =
                        slot0 + s <= query_slot && 4 * group + r < num_rows ? mul_rn(dot[r][c], scale) : minus_infinity();
                }
            }
        }
        __syncwarp();
        for (int r = 4 * group; r < 4 * group + 4; ++r) {
            float row_max, row_sum, merged_max;
            split_softmax(scores + r * kScoreStride, row_max, row_sum);
            if (column == 0) {
                merge_weights(running_max[r], row_max, keep[r], take[r], merged_max);
                running_sum[r] = merge(running_sum[r], keep[r], row_sum, take[r]);
                running_max[r] = merged_max;
            }
        }
        __syncwarp();
        float split_out[4][4];
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) split_out[r][c] = 0.0f;
        for (int t = 0; t < kSubtiles; ++t) {
            const int slot0 = first_slot + t * kSubtile;
            if (slot0 > last) break;
            __syncthreads();
            load_tile(v_hsd + (i64)kv_head * ctx * kHeadDim, slot0);
            __syncthreads();
            if (!has_channels) continue;
            float acc[4][4];
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) acc[r][c] = 0.0f;
#pragma unroll 2
            for (int s = 0; s < kSubtile; s += 4) {
                float4 value[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) value[i] = load4(&tile[(s + i) * kStride + 4 * column]);
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const float4 p = *(const float4*)&scores[(4 * group + r) * kScoreStride + t * kSubtile + s];
                    const float ps[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        acc[r][0] = fma_rn(ps[i], value[i].x, acc[r][0]);
                        acc[r][1] = fma_rn(ps[i], value[i].y, acc[r][1]);
                        acc[r][2] = fma_rn(ps[i], value[i].z, acc[r][2]);
                        acc[r][3] = fma_rn(ps[i], value[i].w, acc[r][3]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) split_out[r][c] = add_rn(split_out[r][c], acc[r][c]);
        }
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                out[r][c] = merge(out[r][c], keep[4 * group + r], split_out[r][c], take[4 * group + r]);
        __syncwarp();
    }
    if (!has_channels) return;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = 4 * group + r;
        if (row >= num_rows) continue;
        const int query = first_query + row / queries_per_kv, head = kv_head * queries_per_kv + row % queries_per_kv;
#pragma unroll
        for (int c = 0; c < 4; ++c)
            out_mhd[((i64)query * num_heads + head) * kHeadDim + 4 * column + c] = div_rn(out[r][c], running_sum[row]);
    }
}

#define ATTEND(SUFFIX, CACHE, HEAD_DIM)                                                                              \
    extern "C" __global__ void __launch_bounds__(kAttentionThreads, 1)                                                \
    attend_split_##SUFFIX(const float* q_mhd, const CACHE* k_hsd, const CACHE* v_hsd, const int* position,           \
                          float* max_mhs, float* sum_mhs, float* out_mhsd, int queries_per_kv, int ctx, float scale) { \
        attend_split<CACHE, HEAD_DIM>(q_mhd, k_hsd, v_hsd, position, max_mhs, sum_mhs, out_mhsd, queries_per_kv,     \
                                      ctx, scale);                                                                   \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kAttentionThreads, 1)                                                \
    attend_tiled_##SUFFIX(const float* q_mhd, const CACHE* k_hsd, const CACHE* v_hsd, const int* position,           \
                          float* out_mhd, int queries_per_kv, int m, int ctx, float scale) {                         \
        attend_tiled<CACHE, HEAD_DIM>(q_mhd, k_hsd, v_hsd, position, out_mhd, queries_per_kv, m, ctx, scale);        \
    }

ATTEND(f32_16, float, 16)
ATTEND(f32_32, float, 32)
ATTEND(f32_64, float, 64)
ATTEND(f32_128, float, 128)
// Merge the splits of attend_split in ascending order: out_mhd [m][heads][d].
// Grid: (ceil(heads * d / 256), m); one channel a thread.
extern "C" __global__ void __launch_bounds__(256)
attend_merge(const float* max_mhs, const float* sum_mhs, const float* out_mhsd, const int* position, float* out_mhd,
             int num_heads, int head_dim, int num_splits) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (channel >= num_heads * head_dim) return;
    const int head = channel / head_dim, d = channel % head_dim;
    const int used = (*position + row) / kSplit + 1;
    const i64 at = ((i64)row * num_heads + head) * num_splits;
    float running_max = minus_infinity(), running_sum = 0.0f, out = 0.0f;
    for (int s = 0; s < used; ++s) {
        float keep, take, merged_max;
        merge_weights(running_max, max_mhs[at + s], keep, take, merged_max);
        running_sum = merge(running_sum, keep, sum_mhs[at + s], take);
        out = merge(out, keep, out_mhsd[(at + s) * head_dim + d], take);
        running_max = merged_max;
    }
    out_mhd[(i64)row * num_heads * head_dim + channel] = div_rn(out, running_sum);
}
