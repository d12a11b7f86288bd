// How a linear is cut over blocks and warps, and a block's ring of weights: one thread has them copied ahead of their
// use, warps take them out. Knows no stage's meaning.

#define COPIES_IN_BULK (__CUDA_ARCH__ == 900)

constexpr int kThreads = kNormThreads;      // kFewThreads too: attention takes all of them
constexpr int kWarps = kThreads / kWarp;
constexpr int kCopyThreads = kWarpgroup;    // beside them; registers are given and taken by whole warpgroups
constexpr int kColumns = 16;           // of half an item
constexpr int kRowBytes = kWarp * 4;   // of an item's codes: a word row of 32 columns
constexpr int kBoxItems = 4;           // copied at a time
constexpr int kCopyAlignment = 1024;    // of what is swizzled; of other copies 128 would do
constexpr int kMostSlots = 24;

// A box in a copy order: column / 16 in 16 bits, first item of its column in 8, kind (0 for lm_head, whose maps follow
// the layers').
constexpr int kItemBit = 16;
constexpr int kKindBit = 24;

// Boxes on their way at a time while blocks wait for one another's words, which wait behind what was asked of the
// memory before them.
constexpr int kMostWhileWaiting = 2;

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
    __device__ int num_whole() const { return num_sets - num_halved; }
    __device__ bool has_half() const { return (int)blockIdx.x < 2 * num_halved; }
    __device__ bool is_upper() const { return blockIdx.x % 2; }
    // Of the lower half.
    __device__ int half_pieces() const { return num_pieces / 2; }
    __device__ int half_items() const { return half_pieces() << gate_up; }
};

__device__ inline void load_shared(uint4& v, u32 at) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
}

__device__ inline void load_shared(uint2& v, u32 at) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
}

__device__ inline void load_shared(float& v, u32 at) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
}

__device__ inline void load_shared(int& v, u32 at) {
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
}

__device__ inline void load_shared(int2& v, u32 at) {
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
}

__device__ inline void store_shared(u32 at, i8 v) { asm volatile("st.shared.s8 [%0], %1;" ::"r"(at), "r"((int)v) : "memory"); }

__device__ inline void store_shared(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }

__device__ inline void store_shared(u32 at, const float4& v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ inline void arrive_times(u32 barrier, int count) {
#if COPIES_IN_BULK
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}

// The copy engine may hold another map that lay there once.
__device__ inline void see_new_map(const u8* map) {
#if COPIES_IN_BULK
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
#endif
}

// What is past the matrix's end reads as zero. Weights are read once a token: they are the first to leave the
// second-level cache, so that norms, copy maps and the cache of a short context stay in it.
__device__ inline void copy_box(u32 to, const u8* map, int column, int item, u32 barrier) {
#if COPIES_IN_BULK
    asm volatile(
        "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;"
        " cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %3, %4}], [%5], once; }" ::"r"(to),
        "l"(map), "r"(column), "r"(0), "r"(item), "r"(barrier)
        : "memory");
#endif
}

// What one lane holds of an item: four columns of one group. Lane l has columns 4 * (l % 8) on of group l / 8.
template <typename Weights>
struct Part {
    static constexpr int kWords = Weights::kWordsPerGroup;                        // of a column and group
    uint4 words[kWords];
    uint2 scales;

    __device__ void load(u32 first_row, int row_bytes, u32 scales_at) {
#pragma unroll
        for (int r = 0; r < kWords; ++r) load_shared(words[r], first_row + r * row_bytes);
        load_shared(scales, scales_at);
    }
};

// A block's ring of `num_slots` boxes of four items each, in shared memory. A box: word rows of its items, then their
// scale rows; of gate and up the rows of the one and of the other in turn. How it is gathered from the matrix is in the
// matrix's copy map. A box is full when its bytes have landed, and empty when its items have been taken.
template <typename Weights>
struct Ring {
    static constexpr int kWords = Weights::kWordsPerGroup;
    static constexpr int kCodesBytes = kBoxItems * kGroupsPerPiece * kWords * kRowBytes;
    static constexpr int kSlotBytes = kCodesBytes + kBoxItems * kGroupsPerPiece * kWarp * 2;

    u32 slots, barriers;               // shared addresses
    int num_slots;

    // One that a box is full, one that it is empty.
    __device__ u32 full(int slot) const { return barriers + slot * 8; }
    __device__ u32 empty(int slot) const { return full(kMostSlots + slot); }

    // By every thread of the block, before any of them meets.
    __device__ void init() const {
        if ((int)threadIdx.x < 2 * kMostSlots) {
            init_barrier(full(threadIdx.x), (int)threadIdx.x < kMostSlots ? 1 : kBoxItems);
            publish_barriers();
        }
    }

    // All of a block's weights in the order of their use, by one thread. `order` is the host's list (token_cuts.py's
    // `copy_order`): how many boxes a layer and in lm_head, then those boxes; a layer's are the same for every layer.
    //
    // While blocks sum no more boxes are on their way than `most_while_summing`. A warp that waits for a box must find
    // the slot's box before it landed, or it would take that one's turn of the barrier for its own; boxes may land in
    // another order than they were asked for. When a box is asked for, those `most_while_summing` before it have
    // landed, so the host keeps that and the boxes a warp passes over between two of its own within `num_slots`
    // (`most_on_their_way`).
    __device__ void copy_all(const u8* copy_maps, const u32* order, int num_layers, int most_while_summing,
                             const volatile int* is_summing) const {
        const int of_layer = order[0];
        int left = of_layer * num_layers + order[1], layer = of_layer ? 0 : num_layers, next = 0;
        if (left == 0) return;
        // The slot that is filled next, and the first whose box may still be on its way.
        int slot = 0, parity = 1, behind = 0, behind_parity = 0, on_their_way = 0;
        u32 box = order[2];
        while (true) {
            wait_barrier(empty(slot), parity);
            while (on_their_way >= (*is_summing ? most_while_summing : kMostWhileWaiting)) {
                wait_barrier(full(behind), behind_parity);
                --on_their_way;
                if (++behind == num_slots) behind = 0, behind_parity ^= 1;
            }
            const u32 barrier = full(slot), to = slots + slot * kSlotBytes;
            const u8* map = copy_maps + (4 * layer + (box >> kKindBit)) * 256;
            const int column = (box & 0xffff) * kColumns, item = box >> kItemBit & 0xff;
            arrive_expecting(barrier, kSlotBytes);
            copy_box(to, map, column, item, barrier);
            copy_box(to + kCodesBytes, map + 128, column, item, barrier);
            ++on_their_way;
            if (--left == 0) return;
            if (++next == of_layer && ++layer < num_layers) next = 0;
            box = __ldg(order + 2 + next);
            if (++slot == num_slots) slot = 0, parity ^= 1;
        }
    }

    // Where a warp is in the ring: the slot of the next set's first box, and its barrier's parity.
    struct __align__(8) Place {
        int slot, parity;
    };

    __device__ Place step(Place place, int boxes) const {
        for (place.slot += boxes; place.slot >= num_slots; place.slot -= num_slots) place.parity ^= 1;
        return place;
    }

    // Item `i` of the `own` that follow one another from some box on; it is in the box at `place`.
    __device__ void take(Part<Weights>& part, Place place, int i, int own, int gate_up) const {
        const int lane = this_thread() % kWarp, piece = i % kBoxItems >> gate_up, half = i & gate_up;
        const int group = (piece * kGroupsPerPiece + lane / 8) << gate_up, q = lane % 8;
        const u32 box = slots + place.slot * kSlotBytes;
        const u32 row = box + (group * kWords + half) * kRowBytes + q * 16;
        const u32 scale_row = box + kCodesBytes + (group + half) * (kRowBytes / 2) + q * 8;
        wait_barrier(full(place.slot), place.parity);
        part.load(row, kRowBytes << gate_up, scale_row);
        __syncwarp();
        // The last item stands for those that its box has no more.
        if (lane == 0) arrive_times(empty(place.slot), i == own - 1 ? kBoxItems - i % kBoxItems : 1);
    }
};
