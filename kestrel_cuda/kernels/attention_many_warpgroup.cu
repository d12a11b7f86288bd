// attention_many.cuh over a float16 cache on Hopper's warpgroup mma, with the same bits: its mma of 16 channels or slots
// sums as mma.m16n8k16 does, wherever in them a channel stands.
//
// A block walks the splits for 128 rows of one kv head, the last by halves. One warpgroup copies keys and values ahead, two
// have 64 rows each: while one multiplies, the other takes exponentials. What earlier splits gave lies in shared memory.

#include "common.cuh"
#include "attention_half.cuh"
#include "barriers.cuh"
#include "warpgroup.cuh"
#include "attention_operands.cuh"

constexpr int kCopierRegisters = 40;   // of 168 a thread that the block begins with
constexpr int kAttenderRegisters = 232;

#define OUT_4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define OUT_16(c, i) OUT_4(c, i), OUT_4(c, i + 4), OUT_4(c, i + 8), OUT_4(c, i + 12)

// c {=, +=} a b for 64 rows of a and 128 of b over 16 channels, both rows in shared memory; nothing is kept of c before
// where `add` is 0.
__device__ inline void mma_m64n128k16(float* c, u64 a, u64 b, int add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.s32 add, %66, 0;"
        " wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
        "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
        "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, %64, %65, add, 1, 1, 0, 0; }"
        : OUT_16(c, 0), OUT_16(c, 16), OUT_16(c, 32), OUT_16(c, 48)
        : "l"(a), "l"(b), "r"(add));
}

// c {=, +=} a b for 64 rows of a, in registers, and 64 columns of b over 16 of its rows in shared memory.
__device__ inline void mma_m64n64k16(float (&c)[32], const u32 (&a)[4], u64 b, int add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.s32 add, %37, 0;"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
        "%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, add, 1, 1, 1; }"
        : OUT_16(c, 0), OUT_16(c, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// A warpgroup's 64 rows. A lane's are lane / 4 and eight below it, of its warp's 16; of the columns 8t .. 8t + 7 of a sum it
// has two neighbours.
template <int kHeadDim>
struct Attender {
    using Block = Shared<kHeadDim>;
    static constexpr int kPanels = Block::kPanels, kScores = kSplit / 2, kKeyScores = kKeySlots / 2;
    static constexpr int kSteps = kSubtile / 16;

    Block& shared;
    int number;                        // of the attending warpgroup
    int last;                          // slot
    float scale;
    int last_slot[2];
    float running_max[2], running_sum[2];

    // The warpgroups multiply by turns, so that one takes exponentials meanwhile.
    __device__ void take_turn() const { asm volatile("bar.sync %0, %1;" ::"r"(1 + number), "n"(2 * kWarpgroup) : "memory"); }

    __device__ void pass_turn() const {
        asm volatile("bar.arrive %0, %1;" ::"r"(2 - number), "n"(2 * kWarpgroup) : "memory");
    }

    __device__ void hand_back(u64* empty) const {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) arrive(shared_address(empty));
    }

    // What has been copied behind so many barriers is there, for an mma too.
    __device__ void wait_for(const u64* full, int count, u32 turn) const {
#pragma unroll
        for (int i = 0; i < count; ++i) wait_barrier(shared_address(full + i), turn & 1);
        show_to_mma();
    }

    __device__ void multiply_keys(float* scores, int stage) const {
        const u64 q = operand(shared_address(shared.q) + number * kAttenderRows * kSwizzledRow);
        const u64 k = operand(shared_address(shared.keys[stage]));
        constexpr u32 kQueryPanel = kTileRows * kSwizzledRow / 16, kKeyPanel = kKeySlots * kSwizzledRow / 16;
        start_mmas();
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            mma_m64n128k16(scores, q + step / 4 * kQueryPanel + step % 4 * 2, k + step / 4 * kKeyPanel + step % 4 * 2,
                           step > 0);
        commit_mmas();
    }

    // Of a split, or of its lower half alone.
    template <int kHalves>
    __device__ void find_scores(float (&scores)[kScores], u32 turn) const {
        wait_for(shared.keys_full, kHalves, turn);
        take_turn();
#pragma unroll
        for (int half = 0; half < kHalves; ++half) multiply_keys(scores + half * kKeyScores, half);
        await_mmas<0>();
        keep_until_here(scores);
        pass_turn();
#pragma unroll
        for (int half = 0; half < kHalves; ++half) hand_back(shared.keys_empty + half);
#pragma unroll
        for (int at = 0; at < kScores; ++at)
            scores[at] = at < kHalves * kKeyScores ? mul_rn(scores[at], scale) : minus_infinity();
    }

    __device__ void mask(float (&scores)[kScores], int first_slot) const {
        const int first = first_slot + threadIdx.x % 4 * 2;
#pragma unroll
        for (int at = 0; at < kScores; ++at)
            if (first + at / 4 * 8 + at % 2 > last_slot[at / 2 % 2]) scores[at] = minus_infinity();
    }

    __device__ void find_maxima(float (&row_max)[2], const float (&scores)[kScores]) const {
        row_max[0] = row_max[1] = minus_infinity();
#pragma unroll
        for (int at = 0; at < kScores; ++at) row_max[at / 2 % 2] = fmaxf(row_max[at / 2 % 2], scores[at]);
        row_max[0] = quad_max(row_max[0]), row_max[1] = quad_max(row_max[1]);
    }

    // Scores of 16 slots become an operand of the mma.
    __device__ void weigh(u32 (&weights)[kSplit / 16][4], const float (&scores)[kScores], const float (&row_max)[2]) const {
        // A row that sees none of the split: every weight is 0, not a NaN.
        const float top[2] = {row_max[0] == minus_infinity() ? 0.0f : row_max[0],
                              row_max[1] == minus_infinity() ? 0.0f : row_max[1]};
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i)
            weights[i / 4][i % 4] = pack_halves(exp2_fast(sub_rn(scores[2 * i], top[i % 2])),
                                                exp2_fast(sub_rn(scores[2 * i + 1], top[i % 2])));
    }

    __device__ u32 own_sums() const { return shared_address(shared.split_sums[threadIdx.x - kWarpgroup]); }

    // Store sums of weights, subtile after subtile. A compiler moves what it likes behind a barrier, but not this, nor the
    // weights that it needs: they are computed before a turn is taken.
    __device__ void sum_weights(const u32 (&weights)[kSplit / 16][4]) const {
        float split_sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int subtile = 0; subtile < kSubtiles; ++subtile) {
            float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
                mma_m16n8k16(sums, weights[subtile * kSteps + step], kHalfOnes, kHalfOnes);
            split_sum[0] = add_rn(split_sum[0], sums[0]), split_sum[1] = add_rn(split_sum[1], sums[2]);
        }
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(own_sums()), "f"(split_sum[0]), "f"(split_sum[1]) : "memory");
    }

    __device__ void multiply_values(float (&acc)[kPanel / 2], const u32 (&weights)[kSplit / 16][4], int subtile,
                                    int panel) const {
        const u64 v = operand(shared_address(shared.values[subtile][panel]));
        start_mmas();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            mma_m64n64k16(acc, weights[subtile * kSteps + step], v + step * (16 * kSwizzledRow >> 4), step > 0);
        commit_mmas();
    }

    // Weighted values of a split, subtile after subtile and panel after panel: one is multiplied while another is added.
    template <int kHalves>
    __device__ void sum_values(float (&split_out)[kPanels][kPanel / 2], const u32 (&weights)[kSplit / 16][4], u32 turn,
                               bool is_last) const {
        constexpr int kStages = 2 * kHalves, kItems = kStages * kPanels;
        float acc[2][kPanel / 2];
#pragma unroll
        for (int i = 0; i < kPanel / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
            for (int i = 0; i < kPanel / 2; ++i) split_out[panel][i] = 0.0f;
        wait_for(shared.values_full, kStages, turn);
        take_turn();
        multiply_values(acc[0], weights, 0, 0);
        multiply_values(acc[1], weights, 1 / kPanels, 1 % kPanels);
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
            if (item + 1 < kItems) await_mmas<1>();
            else await_mmas<0>();
            keep_until_here(acc[item % 2]);
#pragma unroll
            for (int i = 0; i < kPanel / 2; ++i)
                split_out[item % kPanels][i] = add_rn(split_out[item % kPanels][i], acc[item % 2][i]);
            if (item + 2 < kItems) multiply_values(acc[item % 2], weights, (item + 2) / kPanels, (item + 2) % kPanels);
        }
        if (number == 0 || !is_last) pass_turn();
#pragma unroll
        for (int i = 0; i < kStages; ++i) hand_back(shared.values_empty + i);
    }

    __device__ float4* merged_of(int tile) const { return (float4*)shared.merged[tile][threadIdx.x - kWarpgroup]; }

    __device__ void merge_split(const float (&split_out)[kPanels][kPanel / 2], const float (&row_max)[2]) {
        float keep[2], take[2], split_sum[2];
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(split_sum[0]), "=f"(split_sum[1]) : "r"(own_sums()) : "memory");
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            merge_weights(running_max[h], row_max[h], keep[h], take[h], running_max[h]);
            running_sum[h] = merge(running_sum[h], keep[h], split_sum[h], take[h]);
        }
#pragma unroll
        for (int tile = 0; tile < kHeadDim / 8; ++tile) {
            const float* of_split = split_out[tile / 8] + tile % 8 * 4;
            const float4 running = *merged_of(tile);
            *merged_of(tile) =
                make_float4(merge(running.x, keep[0], of_split[0], take[0]), merge(running.y, keep[0], of_split[1], take[0]),
                            merge(running.z, keep[1], of_split[2], take[1]), merge(running.w, keep[1], of_split[3], take[1]));
        }
    }

    template <int kHalves>
    __device__ void add_split(int first_slot, int start, u32 turn) {
        float row_max[2], split_out[kPanels][kPanel / 2];
        u32 weights[kSplit / 16][4];
        {
            float scores[kScores];
            find_scores<kHalves>(scores, turn);
            if (first_slot + kSplit - 1 > start) mask(scores, first_slot);
            find_maxima(row_max, scores);
            weigh(weights, scores, row_max);
        }
        sum_weights(weights);
        sum_values<kHalves>(split_out, weights, turn, first_slot + kSplit > last);
        merge_split(split_out, row_max);
    }

    __device__ void run(int start) {
        running_max[0] = running_max[1] = minus_infinity(), running_sum[0] = running_sum[1] = 0.0f;
#pragma unroll
        for (int tile = 0; tile < kHeadDim / 8; ++tile) *merged_of(tile) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (number == kAttenders - 1) pass_turn();
        u32 turn = 0;
        int first_slot = 0;
#pragma unroll 1
        for (; first_slot + kKeySlots <= last; first_slot += kSplit, ++turn) add_split<2>(first_slot, start, turn);
        if (first_slot <= last) add_split<1>(first_slot, start, turn);
    }

    __device__ void store(float* row_d, int h) const {
#pragma unroll 2
        for (int tile = 0; tile < kHeadDim / 8; ++tile) {
            const float2 sum = ((const float2*)merged_of(tile))[h];
            *(float2*)(row_d + tile * 8) = make_float2(div_rn(sum.x, running_sum[h]), div_rn(sum.y, running_sum[h]));
        }
    }
};

// q_mhd, out_mhd [m][heads][d]; k, v [kv_heads][ctx] rows. Dynamic shared memory: a `Shared`. Grid: (kv_heads, ceil(m /
// queries of a tile)).
template <int kHeadDim>
__device__ inline void attend_warpgroups(const float* q_mhd, const u16* k_hsd, const u16* v_hsd, const int* position,
                                         float* out_mhd, int queries_per_kv, int m, int ctx, float scale) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& shared = *(Shared<kHeadDim>*)bytes;
    const int tile_queries = kTileRows / queries_per_kv;
    // The latest queries see the most slots: they start first, so that no long block is left for the end.
    const int first_query = ((int)gridDim.y - 1 - (int)blockIdx.y) * tile_queries;
    const int num_queries = min(tile_queries, m - first_query);
    const int start = *position + first_query, last = start + num_queries - 1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kKeyStages; ++i) {
            init_barrier(shared_address(shared.keys_full + i), kWarpgroup);
            init_barrier(shared_address(shared.keys_empty + i), kAttenders * kWarpgroup / kWarp);
        }
        for (int i = 0; i < kValueStages; ++i) {
            init_barrier(shared_address(shared.values_full + i), kWarpgroup);
            init_barrier(shared_address(shared.values_empty + i), kAttenders * kWarpgroup / kWarp);
        }
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        give_registers_back<kCopierRegisters>();
        const i64 of_head = (i64)blockIdx.x * ctx * kHeadDim;
        Copier<kHeadDim>{k_hsd + of_head, v_hsd + of_head, last}.run(shared);
    } else {
        take_registers<kAttenderRegisters>();
        const TileRows rows(first_query, num_queries, queries_per_kv);
        put_queries<kHeadDim>(shared, q_mhd, rows);
        const int number = threadIdx.x / kWarpgroup - 1;
        const int own_row = number * kAttenderRows + threadIdx.x % kWarpgroup / kWarp * kMmaRows + threadIdx.x % kWarp / 4;
        Attender<kHeadDim> attender = {shared, number, last, scale};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = own_row + 8 * h;
            attender.last_slot[h] = r < rows.num_rows ? start + rows.query(r) : -1;
        }
        attender.run(start);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = own_row + 8 * h;
            if (r < rows.num_rows) attender.store(out_mhd + (i64)rows.head(r) * kHeadDim + threadIdx.x % 4 * 2, h);
        }
    }
}

#define ATTEND_WARPGROUPS(HEAD_DIM)                                                                                    \
    extern "C" __global__ void __launch_bounds__(kTileThreads, 1)                                                      \
    attend_warpgroups_f16_##HEAD_DIM(const float* q_mhd, const u16* k_hsd, const u16* v_hsd, const int* position,      \
                                     float* out_mhd, int queries_per_kv, int m, int ctx, float scale) {                \
        attend_warpgroups<HEAD_DIM>(q_mhd, k_hsd, v_hsd, position, out_mhd, queries_per_kv, m, ctx, scale);            \
    }

ATTEND_WARPGROUPS(64)
ATTEND_WARPGROUPS(128)
