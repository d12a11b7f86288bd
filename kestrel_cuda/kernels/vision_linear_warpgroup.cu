// bfloat16 linears of the vision tower on Hopper's warpgroup mma: y = x w^T + bias, with what follows.
//
// A multiprocessor has one block, which takes tiles of 128 rows one after another. One warpgroup copies them, 64 inputs
// at a time, into a ring of stages; two others sum up a tile each by turns, so that one multiplies while the other
// stores. A row's sums run over the inputs in one order, whatever the number of rows.

#include "common.cuh"
#include "vision.cuh"
#include "vision_outputs.cuh"
#include "barriers.cuh"
#include "warpgroup.cuh"

constexpr int kTileM = 128;
constexpr int kTileK = kSwizzledRow / 2;
constexpr int kMmaM = 64;
constexpr int kMmaK = 16;
constexpr int kMmas = kTileM / kMmaM;
constexpr int kSummers = 2;
constexpr int kTileThreads = (1 + kSummers) * kWarpgroup;
constexpr int kCopierRegisters = 56;           // of 168 a thread that the block begins with
constexpr int kSummerRegisters = 224;
constexpr int kChunk = 8;                      // values of a copy of 16 bytes
constexpr int kWarpRows = kMmaM / 4;           // of an mma
constexpr int kPanel = 64;                     // columns that a warp stores at a time
constexpr int kPanelLanes = kPanel / kOutValues;
constexpr int kPanelRows = kWarp / kPanelLanes;

template <int kTileN>
struct alignas(1024) Stage {
    u16 x[kTileM * kTileK];
    u16 w[kTileN * kTileK];
};

template <int kTileN>
struct Shared {
    static constexpr int kStages = kTileN > 128 ? 3 : 4;
    static constexpr int kOutStride = kTileN + 8;          // the same pair of eight rows meets in no bank
    Stage<kTileN> stages[kStages];
    float out[kTileM * kOutStride];                        // of the summer that stores
    u64 full[kStages], empty[kStages], issued, stored;     // barriers; the last two turn once a tile
};

// Wait for the other warps of this warpgroup, at a barrier of their own.
__device__ inline void meet_warpgroup(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kWarpgroup) : "memory");
}

// sums += x w^T: 64 rows by 128 or 192 columns over 16 inputs. Of the columns 8 j to 8 j + 7 a lane has two neighbours,
// at lane % 4 * 2: sums 4 j and 4 j + 1 are of row lane / 4 of its warp's 16, the other two of the row 8 below.
#define SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)

__device__ inline void multiply(float (&sums)[64], u64 x, u64 w) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
        "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
        "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"
        "%60,%61,%62,%63"
        "}, %64, %65, 1, 1, 1, 0, 0;"
        : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48)
        : "l"(x), "l"(w));
}

__device__ inline void multiply(float (&sums)[96], u64 x, u64 w) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
        "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
        "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"
        "%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
        "}, %96, %97, 1, 1, 1, 0, 0;"
        : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48),
          SUMS_16(64), SUMS_16(80)
        : "l"(x), "l"(w));
}

// A thread's share of the copies of one matrix: a chunk of every 16th row of a tile.
template <int kRows>
struct Copies {
    static constexpr int kRowChunks = kTileK / kChunk, kRowStep = kWarpgroup / kRowChunks;
    static_assert(kRowStep % 8 == 0, "a thread's chunks are swizzled alike");
    const u16* from;
    i64 next_rows;
    int num_rows, num_inputs;          // left from its own on

    __device__ Copies(const u16* from_rk, int first_row, int all_rows, int k) {
        const int chunk = threadIdx.x % kRowChunks, own_row = threadIdx.x / kRowChunks;
        from = from_rk + (i64)(first_row + own_row) * k + chunk * kChunk, next_rows = (i64)kRowStep * k;
        num_rows = all_rows - first_row - own_row, num_inputs = k - chunk * kChunk;
    }

    // The next 64 inputs; past the ends nothing is read, and zeros are written.
    __device__ void next(u32 tile) {
        const u32 to = tile + swizzled(threadIdx.x / kRowChunks, threadIdx.x % kRowChunks);
#pragma unroll
        for (int i = 0; i < kRows / kRowStep; ++i)
            copy_16(to + i * kRowStep * kSwizzledRow, from + i * next_rows, num_inputs > 0 && i * kRowStep < num_rows);
        from += kTileK, num_inputs -= kTileK;
    }
};

// Where the ring stands: stages are filled and used in order, over all tiles of the block.
template <int kStages>
struct Place {
    int stage, turn;

    __device__ explicit Place(int step) : stage(step % kStages), turn(step / kStages) {}
    __device__ void next() {
        if (++stage == kStages) stage = 0, ++turn;
    }
};

template <int kTileN>
struct Linear {
    using Block = Shared<kTileN>;
    using RingPlace = Place<Block::kStages>;
    static constexpr int kSums = kTileN / 2;               // of a thread and an mma

    Block& shared;
    const float* bias_n;
    void* out_mn;
    int m, n, num_steps, after, out_is_float;

    __device__ int tiles_n() const { return (n + kTileN - 1) / kTileN; }
    __device__ int num_tiles() const { return tiles_n() * ((m + kTileM - 1) / kTileM); }
    __device__ int first_m(int tile) const { return tile / tiles_n() * kTileM; }
    __device__ int first_n(int tile) const { return tile % tiles_n() * kTileN; }

    __device__ void copy(const u16* x_mk, const u16* w_nk, int k) const {
        const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
        RingPlace at(0);
#pragma unroll 1
        for (int tile = blockIdx.x; tile < num_tiles(); tile += gridDim.x) {
            Copies<kTileM> x(x_mk, first_m(tile), m, k);
            Copies<kTileN> w(w_nk, first_n(tile), n, k);
#pragma unroll 1
            for (int step = 0; step < num_steps; ++step) {
                if (at.turn > 0) wait_barrier(empty + at.stage * 8, (at.turn - 1) & 1);
                x.next(shared_address(shared.stages[at.stage].x));
                w.next(shared_address(shared.stages[at.stage].w));
                arrive_after_copies(full + at.stage * 8);
                at.next();
            }
        }
        commit_copies();
        await_copies<0>();
    }

    // The tiles of this warpgroup: every second one of the block.
    __device__ void sum_up(int summer) const {
        const u32 issued = shared_address(&shared.issued), stored = shared_address(&shared.stored);
#pragma unroll 1
        for (int i = summer;; i += kSummers) {
            const int tile = blockIdx.x + i * gridDim.x;
            if (tile >= num_tiles()) return;
            float sums[kMmas][kSums];
            // A parity tells two turns apart, no more. So no warp waits for a turn while another is a tile behind it,
            // nor for the ring before the other summer is done with it for the tile before.
            meet_warpgroup(1 + summer);
            if (i > 0) wait_barrier(issued, (i - 1) & 1);
            multiply_tile(sums, RingPlace(i * num_steps), issued);
            if (i > 0) wait_barrier(stored, (i - 1) & 1);
            put(sums);
            __syncwarp();
            if (after == kAdd) add_rows(first_m(tile), first_n(tile));
            else store_rows(first_m(tile), first_n(tile));
            __syncwarp();
            if (threadIdx.x % kWarp == 0) arrive(stored);
        }
    }

    __device__ void multiply_tile(float (&sums)[kMmas][kSums], RingPlace at, u32 issued) const {
        const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
        const bool speaks = threadIdx.x % kWarp == 0;
#pragma unroll
        for (int mma = 0; mma < kMmas; ++mma)
#pragma unroll
            for (int i = 0; i < kSums; ++i) sums[mma][i] = 0.0f;
        int before = 0;
#pragma unroll 1
        for (int step = 0; step < num_steps; ++step) {
            wait_barrier(full + at.stage * 8, at.turn & 1);
            show_to_mma();
            const u32 x = shared_address(shared.stages[at.stage].x), w = shared_address(shared.stages[at.stage].w);
            start_mmas();
#pragma unroll
            for (int i = 0; i < kTileK; i += kMmaK)
#pragma unroll
                for (int mma = 0; mma < kMmas; ++mma)
                    multiply(sums[mma], operand(x + mma * kMmaM * kSwizzledRow + i * 2), operand(w + i * 2));
            commit_mmas();
            // Only the mma of this step is on its way: the stage before is read.
            await_mmas<1>();
            if (speaks && step > 0) arrive(empty + before * 8);
            before = at.stage;
            at.next();
        }
        if (speaks) arrive(issued);
        await_mmas<0>();
        if (speaks) arrive(empty + before * 8);
#pragma unroll
        for (int mma = 0; mma < kMmas; ++mma) keep_until_here(sums[mma]);
    }

    // A warp's rows of an mma, in the room for outputs.
    __device__ float* own_rows(int mma) const {
        const int warp = threadIdx.x % kWarpgroup / kWarp;
        return shared.out + (mma * kMmaM + warp * kWarpRows) * Block::kOutStride;
    }

    // Fours of columns 32 apart take turns with their neighbours, so that eight lanes' fours meet in no bank.
    __device__ void put(const float (&sums)[kMmas][kSums]) const {
        const int lane = threadIdx.x % kWarp, pair = lane % 4 * 2;
#pragma unroll
        for (int mma = 0; mma < kMmas; ++mma) {
            float* rows = own_rows(mma) + lane / 4 * Block::kOutStride;
#pragma unroll
            for (int j = 0; j < kTileN / 8; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *(float2*)(rows + h * 8 * Block::kOutStride + ((j * 8 + pair) ^ j / 4 % 2 * 4)) =
                        make_float2(sums[mma][4 * j + 2 * h], sums[mma][4 * j + 2 * h + 1]);
        }
    }

    __device__ void get(float (&values)[kOutValues], const float* row, int column) const {
        const int turned = column ^ column / 32 % 2 * 4;
        const float4 low = *(const float4*)(row + turned), high = *(const float4*)(row + (turned ^ 4));
        values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
        values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    }

    __device__ void get_bias(float (&bias)[kOutValues], int column) const {
#pragma unroll
        for (int i = 0; i < kOutValues; ++i) bias[i] = bias_n[column + i];
    }

    __device__ void store_rows(int first_m, int first_n) const {
        const int lane = threadIdx.x % kWarp, warp_row = threadIdx.x % kWarpgroup / kWarp * kWarpRows;
#pragma unroll 1
        for (int own = lane % kPanelLanes * kOutValues; own < kTileN && first_n + own < n; own += kPanel) {
            float bias[kOutValues], sums[kOutValues];
            get_bias(bias, first_n + own);
#pragma unroll 1
            for (int i = 0; i < kMmas * kWarpRows; i += kPanelRows) {
                const int mma = i / kWarpRows, row = i % kWarpRows + lane / kPanelLanes;
                const int to_row = first_m + mma * kMmaM + warp_row + row;
                if (to_row >= m) break;
                const i64 at = (i64)to_row * n + first_n + own;
                get(sums, own_rows(mma) + row * Block::kOutStride, own);
                store_outputs(out_mn, at, sums, bias, Before(), after, out_is_float);
            }
        }
    }

    // What is added to is read for 16 rows before any is stored: one read's wait instead of four.
    __device__ void add_rows(int first_m, int first_n) const {
        const int lane = threadIdx.x % kWarp, warp_row = threadIdx.x % kWarpgroup / kWarp * kWarpRows;
#pragma unroll 1
        for (int own = lane % kPanelLanes * kOutValues; own < kTileN && first_n + own < n; own += kPanel) {
            float bias[kOutValues], sums[kOutValues];
            get_bias(bias, first_n + own);
#pragma unroll 1
            for (int mma = 0; mma < kMmas; ++mma) {
                const int first_row = first_m + mma * kMmaM + warp_row + lane / kPanelLanes;
                const i64 first_at = (i64)first_row * n + first_n + own;
                Before before[kWarpRows / kPanelRows];
#pragma unroll
                for (int i = 0; i < kWarpRows; i += kPanelRows)
                    before[i / kPanelRows].load(out_mn, first_at + (i64)i * n, first_row + i < m);
#pragma unroll
                for (int i = 0; i < kWarpRows; i += kPanelRows) {
                    if (first_row + i >= m) continue;
                    get(sums, own_rows(mma) + (i + lane / kPanelLanes) * Block::kOutStride, own);
                    store_outputs(out_mn, first_at + (i64)i * n, sums, bias, before[i / kPanelRows], kAdd, true);
                }
            }
        }
    }
};

template <int kTileN>
__device__ inline void affine(const u16* x_mk, const u16* w_nk, const float* bias_n, void* out_mn, int m, int n, int k,
                              int after, int out_is_float) {
    extern __shared__ __align__(1024) unsigned char room[];
    Shared<kTileN>& shared = *(Shared<kTileN>*)room;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Shared<kTileN>::kStages; ++stage) {
            init_barrier(shared_address(shared.full + stage), kWarpgroup);
            init_barrier(shared_address(shared.empty + stage), kWarpgroup / kWarp);
        }
        init_barrier(shared_address(&shared.issued), kWarpgroup / kWarp);
        init_barrier(shared_address(&shared.stored), kWarpgroup / kWarp);
    }
    __syncthreads();
    const Linear<kTileN> linear{shared, bias_n, out_mn, m, n, (k + kTileK - 1) / kTileK, after, out_is_float};
    const int warpgroup = threadIdx.x / kWarpgroup;
    if (warpgroup == 0) {
        give_registers_back<kCopierRegisters>();
        linear.copy(x_mk, w_nk, k);
    } else {
        take_registers<kSummerRegisters>();
        linear.sum_up(warpgroup - 1);
    }
}

// x_mk [m][k], w_nk [n][k] bfloat16, n and k multiples of 8; out_mn [m][n] bfloat16 or float32. Dynamic shared memory:
// a Shared. Grid: as many blocks as multiprocessors, or as tiles of 128 x WIDTH if those are fewer.
#define AFFINE(WIDTH)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kTileThreads, 1)                                                      \
    affine_warpgroup_bf16_##WIDTH(const u16* x_mk, const u16* w_nk, const float* bias_n, void* out_mn, int m, int n,   \
                                  int k, int after, int out_is_float) {                                                \
        affine<WIDTH>(x_mk, w_nk, bias_n, out_mn, m, n, k, after, out_is_float);                                       \
    }

AFFINE(128)
AFFINE(192)
