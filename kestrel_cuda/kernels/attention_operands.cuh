// What the warpgroups of attention_many_warpgroup.cu multiply: how it lies in shared memory, and who puts it there.
//
// An operand's row is panels of 64 channels. Keys and queries lie as attention_half.cuh feeds them to an mma: of a run of
// 32 channels, the lower fours of its four eights make up the first 16.

constexpr int kAttenders = 2;
constexpr int kAttenderRows = 64;
constexpr int kTileRows = kAttenders * kAttenderRows;
constexpr int kTileThreads = (1 + kAttenders) * kWarpgroup;
constexpr int kPanel = 64;             // channels of a row of 128 bytes
constexpr int kKeySlots = 128;         // of a stage of keys; of values a subtile
constexpr int kKeyStages = kSplit / kKeySlots;
constexpr int kValueStages = kSubtiles;
constexpr int kFour = 4, kEight = 8;   // channels of a copy of 8 or 16 bytes

template <int kHeadDim>
struct Shared {
    static constexpr int kPanels = kHeadDim / kPanel;
    unsigned char q[kPanels][kTileRows * kSwizzledRow];
    unsigned char keys[kKeyStages][kPanels][kKeySlots * kSwizzledRow];
    unsigned char values[kValueStages][kPanels][kSubtile * kSwizzledRow];
    // Of these a thread reads only what it wrote.
    float merged[kHeadDim / 8][kAttenders * kWarpgroup][4];
    float split_sums[kAttenders * kWarpgroup][2];
    u64 keys_full[kKeyStages], keys_empty[kKeyStages], values_full[kValueStages], values_empty[kValueStages];
};

// Where four channels from a multiple of four on lie among a row's fours.
__device__ inline int place_of_four(int four) { return (four / 8 * 2 + four % 2) * 4 + four / 2 % 4; }

// The same in bytes from the first panel's first row on, in panels of kRows rows.
template <int kRows>
__device__ inline u32 four_at(int row, int four) {
    const int place = place_of_four(four), chunk = place / 2;
    return chunk / 8 * (kRows * kSwizzledRow) + swizzled(row, chunk % 8) + place % 2 * 8;
}

__device__ inline void copy_8(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ inline void copy_8(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0) : "memory");
}

// Rows of a kv head up to the slot `last`, in the order of their use: the keys of a split, then its values. Slots past the
// last read as zero: their weights are 0, and 0 times a NaN would not be.
template <int kHeadDim>
struct Copier {
    using Block = Shared<kHeadDim>;
    const u16 *k_sd, *v_sd;
    int last;

    // Whole stages need no address but the first: what follows lies at constant distances.
    __device__ void copy_keys(u32 to, int first_slot) const {
        constexpr int kFours = kHeadDim / kFour, kSlots = kWarpgroup / kFours;
        static_assert(8 % kSlots == 0, "slots eight apart are swizzled alike");
        const int four = threadIdx.x % kFours, own = threadIdx.x / kFours;
        const u16* from = k_sd + (i64)(first_slot + own) * kHeadDim + four * kFour;
        if (first_slot + kKeySlots - 1 <= last) {
#pragma unroll
            for (int turn = 0; turn < 8; turn += kSlots) {
                const u32 of_turn = to + four_at<kKeySlots>(own + turn, four);
#pragma unroll
                for (int slot = 0; slot < kKeySlots; slot += 8)
                    copy_8(of_turn + slot * kSwizzledRow, from + (slot + turn) * kHeadDim);
            }
            return;
        }
#pragma unroll 1
        for (int slot = own; slot < kKeySlots; slot += kSlots, from += kSlots * kHeadDim)
            copy_8(to + four_at<kKeySlots>(slot, four), from, first_slot + slot <= last);
    }

    __device__ void copy_values(u32 to, int first_slot) const {
        constexpr int kEights = kHeadDim / kEight, kSlots = kWarpgroup / kEights;
        static_assert(kSlots % 8 == 0, "a thread's chunks are swizzled alike");
        const int eight = threadIdx.x % kEights, own = threadIdx.x / kEights;
        const u16* from = v_sd + (i64)(first_slot + own) * kHeadDim + eight * kEight;
        to += eight / 8 * (kSubtile * kSwizzledRow) + swizzled(own, eight % 8);
        if (first_slot + kSubtile - 1 <= last) {
#pragma unroll
            for (int slot = 0; slot < kSubtile; slot += kSlots) copy_16(to + slot * kSwizzledRow, from + slot * kHeadDim, true);
            return;
        }
#pragma unroll 1
        for (int slot = 0; slot < kSubtile; slot += kSlots, from += kSlots * kHeadDim)
            copy_16(to + slot * kSwizzledRow, from, first_slot + own + slot <= last);
    }

    __device__ void run(Block& shared) const {
        u32 turn = 0;
#pragma unroll 1
        for (int first_slot = 0; first_slot <= last; first_slot += kSplit, ++turn) {
#pragma unroll 1
            for (int i = 0; i < kKeyStages && first_slot + i * kKeySlots <= last; ++i) {
                if (turn > 0) wait_barrier(shared_address(shared.keys_empty + i), (turn - 1) & 1);
                copy_keys(shared_address(shared.keys[i]), first_slot + i * kKeySlots);
                arrive_after_copies(shared_address(shared.keys_full + i));
            }
#pragma unroll 1
            for (int i = 0; i < kValueStages && first_slot + i / 2 * kKeySlots <= last; ++i) {
                if (turn > 0) wait_barrier(shared_address(shared.values_empty + i), (turn - 1) & 1);
                copy_values(shared_address(shared.values[i]), first_slot + i * kSubtile);
                arrive_after_copies(shared_address(shared.values_full + i));
            }
        }
        commit_copies();
        await_copies<0>();
    }
};

// The rows of a tile: row r is query r / queries_per_kv of it, head r % queries_per_kv of the kv head's.
struct TileRows {
    int num_rows, first_head, heads_between, reciprocal;

    __device__ TileRows(int first_query, int num_queries, int queries_per_kv)
        : num_rows(num_queries * queries_per_kv),
          first_head((first_query * (int)gridDim.x + (int)blockIdx.x) * queries_per_kv),
          heads_between(((int)gridDim.x - 1) * queries_per_kv),
          reciprocal((65536 + queries_per_kv - 1) / queries_per_kv) {}

    // Of a row below 256, without a division.
    __device__ int query(int r) const { return r * reciprocal >> 16; }

    // Counted over all queries.
    __device__ int head(int r) const { return first_head + r + query(r) * heads_between; }
};

// Queries rounded to float16, as operands lie, by those who attend; rows that the tile does not have are zeros. All are
// asked for before the first is there.
template <int kHeadDim>
__device__ inline void put_queries(Shared<kHeadDim>& shared, const float* q_mhd, const TileRows& rows) {
    constexpr int kFours = kHeadDim / kFour, kThreads = kAttenders * kWarpgroup, kStep = kThreads / kFours;
    static_assert(kStep % 8 == 0, "a thread's rows are swizzled alike");
    const int thread = threadIdx.x - kWarpgroup, own = thread / kFours, four = thread % kFours;
    const u32 to = shared_address(shared.q) + four_at<kTileRows>(own, four);
    float4 x[kTileRows / kStep];
#pragma unroll
    for (int i = 0; i < kTileRows / kStep; ++i) {
        const int r = own + i * kStep;
        x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (r < rows.num_rows) x[i] = *(const float4*)(q_mhd + (i64)rows.head(r) * kHeadDim + four * kFour);
    }
#pragma unroll
    for (int i = 0; i < kTileRows / kStep; ++i)
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + i * kStep * kSwizzledRow),
                     "r"(pack_halves(x[i].x, x[i].y)), "r"(pack_halves(x[i].z, x[i].w))
                     : "memory");
    show_to_mma();
    asm volatile("bar.sync %0, %1;" ::"n"(1 + kAttenders), "n"(kThreads) : "memory");
}
