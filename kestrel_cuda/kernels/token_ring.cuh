// How a linear is cut over blocks and warps, and a warp's ring of weights that the bulk copy engine fills ahead of their
// use. Knows no stage's meaning.

#define COPIES_IN_BULK (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)

constexpr int kThreads = kNormThreads;      // kFewThreads too: attention takes the whole block
constexpr int kWarps = kThreads / kWarp;
constexpr int kColumns = 16;           // of half an item
constexpr int kCopyAlignment = 128;

enum Kind { kQkv, kO, kGateUp, kDown, kLmHead, kNumKinds };

// How a linear is cut. A set is what a block sums up at a time; an item is what a warp sums up of it at a time: 32
// columns of a piece, or 16 columns of two neighbouring pieces. `gate_up`: a set is 32 gate columns and their 32 up
// columns, items in turn of the one and of the other. The last `num_halved` sets, which would keep a few blocks a round
// longer than the others, are taken by two blocks each: an even one has the lower pieces, the next one the rest.
struct Cut {
    int n, num_groups, num_sets, num_items, num_pieces, set_columns, items_are_pairs, gate_up, num_halved;
    int sets_at_once;                  // summed up before a barrier

    __device__ int width() const { return items_are_pairs ? kColumns : gate_up ? 4 * kColumns : 2 * kColumns; }
    // Activation codes and scales.
    __device__ int input_bytes() const { return num_groups * (kGroup + 4); }
    __device__ int sums_of_set() const { return num_pieces * width(); }
    __device__ int num_whole() const { return num_sets - num_halved; }
    __device__ bool has_half() const { return (int)blockIdx.x < 2 * num_halved; }
    __device__ bool is_upper() const { return blockIdx.x % 2; }
    // Of the lower half.
    __device__ int half_pieces() const { return num_pieces / 2; }
    __device__ int half_items() const { return half_pieces() << gate_up; }
};

// Bulk copies: a tile of a matrix into shared memory, counted in bytes on a barrier there.

__device__ inline void publish_barriers() {
#if COPIES_IN_BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ inline void expect_bytes(u32 barrier, int num_bytes) {
#if COPIES_IN_BULK
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
#endif
}

// Columns past the matrix's end read as zero. Weights are read once a token: they are the first to leave the second-level
// cache, so that norms, copy maps and the cache of a short context stay in it.
__device__ inline void copy_item(u32 to, const u8* map, int column, int half, int item, u32 barrier) {
#if COPIES_IN_BULK
    asm volatile(
        "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;"
        " cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4, %5}], [%6], once; }" ::"r"(to),
        "l"(map), "r"(column), "r"(half), "r"(0), "r"(item), "r"(barrier)
        : "memory");
#endif
}

// One warp's part of the weights of a token, copied ahead into its ring of `num_slots` items. An item in a slot: its
// word rows of 32 columns, then its scale rows; how it is gathered from the matrix is in the matrix's copy map.
template <typename Weights>
struct Ring {
    static constexpr int kWords = Weights::kWordsPerGroup;                        // of a column and group
    static constexpr int kCodesBytes = kGroupsPerPiece * kWords * kWarp * 4;
    static constexpr int kSlotBytes = kCodesBytes + kGroupsPerPiece * kWarp * 2;

    const u8* copy_maps;               // by stage
    const Cut* cuts;                   // by kind, in shared memory
    unsigned char* slots;
    u32 barriers;
    int num_slots, num_stages;
    struct Place {
        int taken, parity;             // slot of the oldest item, and its barrier's
        int filled;                    // slot that is filled next
        int stage, set, item, end;     // what it is filled with, up to item `end` of the set
    } at;

    // What one lane holds of an item: four columns of one group. Lane l has columns 4 * (l % 8) on of group l / 8.
    struct Part {
        uint4 words[kWords];
        uint2 scales;
    };

    __device__ void start() {
        at.taken = at.parity = at.filled = 0, at.stage = -1;
        next_stage();
        for (int s = 0; s < num_slots; ++s) fill();
    }

    __device__ void take(Part& part) {
        wait_barrier(barriers + at.taken * 8, at.parity);
        const int lane = threadIdx.x % kWarp, group = lane / 8, q = lane % 8;
        const unsigned char* from = slots + at.taken * kSlotBytes;
        const uint4* rows = (const uint4*)from + group * kWords * 8 + q;
#pragma unroll
        for (int r = 0; r < kWords; ++r) part.words[r] = rows[r * 8];
        part.scales = ((const uint2*)(from + kCodesBytes))[lane];
        __syncwarp();
        if (++at.taken == num_slots) at.taken = 0, at.parity ^= 1;
    }

    // Start the next copy, into the room of an item taken.
    __device__ void fill() {
        if (at.stage >= num_stages) return;
        const Cut& c = cut();
        if (threadIdx.x % kWarp == 0) {
            const u32 barrier = barriers + at.filled * 8, to = shared_address(slots + at.filled * kSlotBytes);
            const u8* map = copy_maps + at.stage * 256;
            const int column = at.set * c.set_columns, half = c.gate_up & at.item, item = at.item >> c.gate_up;
            expect_bytes(barrier, kSlotBytes);
            copy_item(to, map, column, half, item, barrier);
            copy_item(to + kCodesBytes, map + 128, column, half, item, barrier);
        }
        if (++at.filled == num_slots) at.filled = 0;
        at.item += kWarps;
        if (at.item < at.end) return;
        at.item = threadIdx.x / kWarp, at.end = c.num_items;
        at.set = at.set >= c.num_whole() ? blockIdx.x : at.set + gridDim.x;
        if (at.set >= c.num_whole()) next_stage();
    }

  private:
    __device__ const Cut& cut() const { return cuts[at.stage == num_stages - 1 ? kLmHead : at.stage % 4]; }

    // The next stage that has work for this warp.
    __device__ void next_stage() {
        at.item = threadIdx.x / kWarp;
        do ++at.stage;
        while (at.stage < num_stages && ((int)blockIdx.x >= cut().num_whole() || at.item >= cut().num_items));
        if (at.stage >= num_stages) return;
        const Cut& c = cut();
        at.set = blockIdx.x, at.end = c.num_items;
        if (!c.has_half()) return;
        const int first = at.item + (c.is_upper() ? c.half_items() : 0), end = c.is_upper() ? c.num_items : c.half_items();
        // Few inputs may leave a warp without an item of the half.
        if (first < end) at.set = c.num_whole() + blockIdx.x / 2, at.item = first, at.end = end;
    }
};
