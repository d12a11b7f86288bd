// Causal grouped-query attention over float16 or int8 entries for many queries: a block walks the splits for 64 rows of one
// kv head, each of its warps for 16 of them. attention_half.cuh has the sums and why a query's result does not depend on
// which kernel made it.
//
// A warp keeps its scores of a whole split in registers, 128 floats a lane, since weights need the split's maximum; two
// neighbouring score tiles then are the fragment that the values' mma takes. What earlier splits gave lies in shared
// memory meanwhile. Keys and values come through a ring of subtiles in the order of their use, the keys of a split and
// then its values: two subtiles are on their way while one is used.

template <int kHeadDim, typename Stages>
struct ManyRows {
    Stages stages;
    float merged[kHeadDim / 8][kTileThreads][4];                         // a thread reads only what it wrote
    // Written alike by the four lanes of a row; a head is counted over all queries.
    float maxima[kTileRows], sums[kTileRows];
    int heads[kTileRows];
};

// Four 8 x 8 tiles of halves, transposed; lane l points to row l % 8 of tile l / 8.
__device__ inline void load_transposed(u32 (&tiles)[4], const u16* row) {
    const u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(at));
}

// A lane's part of its upper (h = 0) or lower query row, as the first operand of the scores' mma; null reads as zero.
template <int kHeadDim>
__device__ inline void round_query(u32 (&q)[Shape<kHeadDim>::kSteps][4], int h, const float* row_d) {
    using S = Shape<kHeadDim>;
    constexpr int kPerRun = S::kKeyHalves / 4;
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
        const int channel = (step / kPerRun * 4 + threadIdx.x % 4) * S::kKeyHalves + step % kPerRun * 4;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row_d) x = *(const float4*)(row_d + channel);
        q[step][h] = pack_halves(x.x, x.y), q[step][h + 2] = pack_halves(x.z, x.w);
    }
}

// Scores of a subtile's slots: score tile t has slots 8t .. 8t + 7.
template <int kHeadDim>
__device__ inline void score_subtile(float (*scores)[4], const u32 (&q)[Shape<kHeadDim>::kSteps][4], const u16* keys_sd,
                                     float scale) {
    using S = Shape<kHeadDim>;
    constexpr int kPerRun = S::kKeyHalves / 4;
    const int quad = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < kSubtile / 8; ++t) scores[t][0] = scores[t][1] = scores[t][2] = scores[t][3] = 0.0f;
    // Runs outermost: eight chains of mma that do not wait for each other.
#pragma unroll
    for (int run = 0; run < S::kKeyRuns; ++run) {
        const u16* of_quad = keys_sd + beside(place<kHeadDim>(quad, j * S::kKeyHalves), run * 4 * S::kKeyHalves);
#pragma unroll
        for (int t = 0; t < kSubtile / 8; ++t) {
            Run<S::kKeyHalves> key;
            key.load(of_quad + t * 8 * kHeadDim);
#pragma unroll
            for (int i = 0; i < kPerRun; ++i)
                mma_m16n8k16(scores[t], q[run * kPerRun + i], key.words[2 * i], key.words[2 * i + 1]);
        }
    }
#pragma unroll
    for (int t = 0; t < kSubtile / 8; ++t)
#pragma unroll
        for (int c = 0; c < 4; ++c) scores[t][c] = mul_rn(scores[t][c], scale);
}

// Add a subtile's weighted values and its sums of weights to those of its split: tile t has channels 8t .. 8t + 7.
template <int kHeadDim>
__device__ inline void add_subtile(float (&split_out)[kHeadDim / 8][4], float (&split_sum)[2], const u32 (*weights)[4],
                                   const u16* values_sd) {
    constexpr int kSteps = kSubtile / 16, kTiles = kHeadDim >= 32 ? 4 : 2;
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int first = 0; first < kHeadDim / 8; first += kTiles) {
        float acc[kTiles][4];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0f;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int t = 0; t < kTiles; t += 2) {
                u32 values[4];
                const u16* of_lane = values_sd + beside(place<kHeadDim>(lane % 16, lane / 16 * 8), (first + t) * 8);
                load_transposed(values, of_lane + step * 16 * kHeadDim);
                mma_m16n8k16(acc[t], weights[step], values[0], values[1]);
                mma_m16n8k16(acc[t + 1], weights[step], values[2], values[3]);
            }
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) split_out[first + t][c] = add_rn(split_out[first + t][c], acc[t][c]);
    }
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) mma_m16n8k16(sums, weights[step], kHalfOnes, kHalfOnes);
    split_sum[0] = add_rn(split_sum[0], sums[0]);
    split_sum[1] = add_rn(split_sum[1], sums[2]);
}

// The largest score of this lane's rows over a split.
__device__ inline void find_maxima(float (&row_max)[2], const float (&scores)[kSplit / 8][4]) {
    row_max[0] = row_max[1] = minus_infinity();
#pragma unroll
    for (int t = 0; t < kSplit / 8; ++t)
#pragma unroll
        for (int c = 0; c < 4; ++c) row_max[c / 2] = fmaxf(row_max[c / 2], scores[t][c]);
    row_max[0] = quad_max(row_max[0]), row_max[1] = quad_max(row_max[1]);
}

// Score tiles 2i and 2i + 1 become the weights of 16 slots.
__device__ inline void weigh(u32 (&weights)[kSplit / 16][4], const float (&scores)[kSplit / 8][4],
                             const float (&row_max)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        // A row that sees none of the split: every weight is 0, not a NaN.
        const float top = row_max[h] == minus_infinity() ? 0.0f : row_max[h];
#pragma unroll
        for (int t = 0; t < kSplit / 8; ++t)
            weights[t / 2][t % 2 * 2 + h] = pack_halves(exp2_fast(sub_rn(scores[t][2 * h], top)),
                                                        exp2_fast(sub_rn(scores[t][2 * h + 1], top)));
    }
}

// q_mhd, out_mhd [m][heads][d]; k, v [kv_heads][ctx] rows. Row r of a block is query r / queries_per_kv of its tile, head
// r % queries_per_kv. Dynamic shared memory: ManyRows. Grid: (kv_heads, ceil(m / queries of a tile)).
template <int kHeadDim, typename Ring>
__device__ inline void attend_tiled(const float* q_mhd, const typename Ring::Rows& k, const typename Ring::Rows& v,
                                    const int* position, float* out_mhd, int queries_per_kv, int m, int ctx, float scale) {
    using S = Shape<kHeadDim>;
    using Shared = ManyRows<kHeadDim, typename Ring::Stages>;
    extern __shared__ __align__(256) unsigned char bytes[];
    Shared& shared = *(Shared*)bytes;
    const int kv_head = blockIdx.x, num_heads = gridDim.x * queries_per_kv;
    const int tile_queries = kTileRows / queries_per_kv;
    // The latest queries see the most slots: they start first, so that no long block is left for the end.
    const int first_query = (gridDim.y - 1 - blockIdx.y) * tile_queries;
    const int num_rows = min(tile_queries, m - first_query) * queries_per_kv;
    const int start = *position + first_query;
    const int last = start + (num_rows - 1) / queries_per_kv;
    const int lane = threadIdx.x % kWarp, quad = lane / 4, j = lane % 4;

    const i64 first_of_head = (i64)kv_head * ctx * kHeadDim;
    Ring ring{shared.stages, k.from(first_of_head), v.from(first_of_head), last};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ring.fetch(i);

    // The lane has rows quad and quad + 8 of its warp's 16; a row that the tile does not have sees no slot.
    const int own_row = threadIdx.x / kWarp * kMmaRows + quad;
    int last_slot[2];
    u32 q[S::kSteps][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = own_row + 8 * h, query = r / queries_per_kv;
        const int head = (first_query + query) * num_heads + kv_head * queries_per_kv + r % queries_per_kv;
        last_slot[h] = r < num_rows ? start + query : -1;
        round_query<kHeadDim>(q, h, r < num_rows ? q_mhd + (i64)head * kHeadDim : nullptr);
        shared.maxima[r] = minus_infinity(), shared.sums[r] = 0.0f, shared.heads[r] = head;
    }
#pragma unroll
    for (int t = 0; t < kHeadDim / 8; ++t)
        *(float4*)shared.merged[t][threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    for (int first_slot = 0; first_slot <= last; first_slot += kSplit) {
        float scores[kSplit / 8][4];
#pragma unroll
        for (int subtile = 0; subtile < kSubtiles; ++subtile) {
            float(*of_subtile)[4] = scores + subtile * (kSubtile / 8);
            if (first_slot + subtile * kSubtile <= last) {
                score_subtile<kHeadDim>(of_subtile, q, ring.next(), scale);
            } else {
#pragma unroll
                for (int t = 0; t < kSubtile / 8; ++t)
#pragma unroll
                    for (int c = 0; c < 4; ++c) of_subtile[t][c] = minus_infinity();
            }
        }
        if (first_slot + kSplit - 1 > start) {
            const int last_seen[2] = {last_slot[0] - first_slot - 2 * j, last_slot[1] - first_slot - 2 * j};
#pragma unroll
            for (int t = 0; t < kSplit / 8; ++t)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (t * 8 + c % 2 > last_seen[c / 2]) scores[t][c] = minus_infinity();
        }
        float row_max[2];
        find_maxima(row_max, scores);
        u32 weights[kSplit / 16][4];
        weigh(weights, scores, row_max);
        float split_out[kHeadDim / 8][4], split_sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < kHeadDim / 8; ++t)
            split_out[t][0] = split_out[t][1] = split_out[t][2] = split_out[t][3] = 0.0f;
#pragma unroll
        for (int subtile = 0; subtile < kSubtiles; ++subtile)
            if (first_slot + subtile * kSubtile <= last)
                add_subtile<kHeadDim>(split_out, split_sum, weights + subtile * (kSubtile / 16), ring.next());
        float keep[2], take[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = own_row + 8 * h;
            const float sum = shared.sums[r];
            float merged_max;
            merge_weights(shared.maxima[r], row_max[h], keep[h], take[h], merged_max);
            __syncwarp();
            shared.maxima[r] = merged_max;
            shared.sums[r] = merge(sum, keep[h], split_sum[h], take[h]);
        }
#pragma unroll
        for (int t = 0; t < kHeadDim / 8; ++t) {
            float4& merged = *(float4*)shared.merged[t][threadIdx.x];
            const float4 running = merged;
            merged = make_float4(merge(running.x, keep[0], split_out[t][0], take[0]),
                                 merge(running.y, keep[0], split_out[t][1], take[0]),
                                 merge(running.z, keep[1], split_out[t][2], take[1]),
                                 merge(running.w, keep[1], split_out[t][3], take[1]));
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (last_slot[h] < 0) continue;
        const float row_sum = shared.sums[own_row + 8 * h];
        float* row_d = out_mhd + (i64)shared.heads[own_row + 8 * h] * kHeadDim + 2 * j;
#pragma unroll 4
        for (int t = 0; t < kHeadDim / 8; ++t) {
            const float2 sum = *(const float2*)&shared.merged[t][threadIdx.x][2 * h];
            *(float2*)(row_d + t * 8) = make_float2(div_rn(sum.x, row_sum), div_rn(sum.y, row_sum));
        }
    }
}
