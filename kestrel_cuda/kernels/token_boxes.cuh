// A split's keys and values in shared memory: one thread has them copied ahead of their use, attention takes them
// there. Knows no stage.

constexpr int kMostKvOnTheirWay = 2;   // boxes of a block, as of weights while words are waited for
constexpr int kMostKvSlots = 2 * kSubtiles;
constexpr int kPanelChannels = 64;     // a row of 128 bytes
constexpr int kPanelBytes = kSubtile * kSwizzledRow;
constexpr int kRowEights = kSwizzledRow / 16;
constexpr int kKeyTakers = kSubtile / 8;    // warps that take the keys of a subtile

// Maps of a layer's keys and values (backends/cuda_token.py): by panels, and of values also by slices.
enum KvMap { kKeyPanels, kValuePanels, kValueSlices, kKvMaps };

    __device__ inline void copy_rows(u32 to, const u8* map, int channel, int slot, int kv_head, u32 barrier) {
#if COPIES_IN_BULK
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
            "l"(map), "r"(channel), "r"(slot), "r"(kv_head), "r"(barrier)
            : "memory");
#endif
    }

// Where a warp is in a ring of boxes, and its barrier's parity.
struct __align__(8) KvPlace {
    int slot, parity;
};

// Boxes of `kBytes`, each waiting to be given back `kTakes` times. `slots` begins at a multiple of 1024.
template <int kBytes, int kTakes>
struct BoxRing {
    static constexpr int kBoxBytes = kBytes;

    // Shared addresses. What does not have to be in registers lies in shared memory itself.
    const u32& slots;
    u32 barriers;
    const int& num_slots;

    __device__ u32 box(KvPlace place) const { return slots + place.slot * kBoxBytes; }
    __device__ u32 full(KvPlace place) const { return barriers + place.slot * 8; }
    __device__ u32 empty(KvPlace place) const { return full({kMostKvSlots + place.slot, 0}); }

    // At most as many boxes on as there are slots.
    __device__ KvPlace step(KvPlace place, int boxes) const {
        place.slot += boxes;
        if (place.slot >= num_slots) place.slot -= num_slots, place.parity ^= 1;
        return place;
    }

    // By every thread of the block, before any of them meets.
    __device__ void init() const {
        if ((int)threadIdx.x < 2 * kMostKvSlots) {
            init_barrier(full({(int)threadIdx.x, 0}), (int)threadIdx.x < kMostKvSlots ? 1 : kTakes);
            publish_barriers();
        }
    }

    // Until the box there has landed.
    __device__ void await(KvPlace place) const { wait_barrier(full(place), place.parity); }

    // By a warp that has read what it needs of a box, so many times at once.
    __device__ void give_back(KvPlace place, int times) const {
        __syncwarp();
        if (this_thread() % kWarp == 0) arrive_times(empty(place), times);
    }

  protected:
    // Before the first.
    __device__ static KvPlace nothing_copied() { return {0, 1}; }

    // When the slot at `next` is free and few others are on their way: its barrier awaits a whole box. `next.parity` is
    // that of its emptiness.
    __device__ void begin_box(KvPlace next) const {
        wait_barrier(empty(next), next.parity);
        // Before the first boxes there is a turn that is over.
        const KvPlace before = step(next, num_slots - kMostKvOnTheirWay);
        await({before.slot, before.slot < next.slot ? next.parity ^ 1 : next.parity});
        arrive_expecting(full(next), kBoxBytes);
    }
};

// A new row's value, as the cache will hold it, and a row of zeros for slots past it.
template <int kHeadDim>
struct __align__(128) RowsBeside {
    HalfRow<kHeadDim> new_value, zeros;
};

// Keys or values of 64 slots of a kv head as the copy engine lays them down: panels of 64 channels in rows of 128
// bytes, swizzled.
template <int kHeadDim>
struct Panels {
    static constexpr int kNum = (kHeadDim + kPanelChannels - 1) / kPanelChannels, kBytes = kNum * kPanelBytes;

    // Where a run of 8 channels of a slot lies. The runs of a panel behind one whose number is a multiple of a power of
    // two differ from it in the bits that they add.
    __device__ static u32 eight(int slot, int i) {
        return swizzled(slot, i % kRowEights) + i / kRowEights * kPanelBytes;
    }

    // A lane's channels of the key of a slot.
    template <int kRuns>
    __device__ static void load_key(Run<8> (&runs)[kRuns], u32 panels, int slot) {
        constexpr int kRowRuns = kRowEights / 4;
        const u32 at = panels + eight(slot, this_thread() % 4);
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            uint4 v;
            load_shared(v, (at ^ run % kRowRuns * 64) + run / kRowRuns * kPanelBytes);
            runs[run] = {{v.x, v.y, v.z, v.w}};
        }
    }
};

// Boxes of keys of a split and then of its values. There are no fewer than a split has subtiles, and the warps meet
// between its keys and its values: so nobody waits for a box whose slot still waits for the one before, or is done with
// one whose slot others have not left yet.
template <int kHeadDim>
struct KvRing : BoxRing<Panels<kHeadDim>::kBytes, kKeyTakers> {
    using Base = BoxRing<Panels<kHeadDim>::kBytes, kKeyTakers>;

    // All that this block attends to, layer by layer, by one thread.
    __device__ void copy_all(const u8* maps, int num_layers, int num_kv_heads, int last, int first_unit) const {
        KvPlace next = Base::nothing_copied();
#pragma unroll 1
        for (; num_layers > 0; --num_layers, maps += kKvMaps * 128)
#pragma unroll 1
            for (int unit = first_unit; unit < (last / kSplit + 1) * num_kv_heads; unit += gridDim.x)
#pragma unroll 1
                for (int which = kKeyPanels; which <= kValuePanels; ++which) {
                    const int first_slot = unit / num_kv_heads * kSplit, end_slot = min(last + 1, first_slot + kSplit);
#pragma unroll 1
                    for (int slot = first_slot; slot < end_slot; slot += kSubtile) {
                        Base::begin_box(next);
#pragma unroll
                        for (int panel = 0; panel < Panels<kHeadDim>::kNum; ++panel)
                            copy_rows(Base::box(next) + panel * kPanelBytes, maps + which * 128, panel * kPanelChannels, slot,
                                      unit % num_kv_heads, Base::full(next));
                        next = Base::step(next, 1);
                    }
                }
    }
};

// Values of a warp's subtile for its part of the channels, as an mma takes them: eight neighbouring channels a tile.
template <int kHeadDim>
struct BoxedValues {
    static constexpr int kHalves = Parts<kHeadDim>::kHalves;
    u32 pairs[4][kHalves][2];

    static __device__ constexpr int channel(int t, int column) { return t * 8 + column; }

    __device__ void pair() {}    // they are

    // `first_of` a slot of the subtile: where the first of the part's runs of 8 channels lies.
    template <typename FirstOf>
    __device__ void load(FirstOf first_of) {
        const FewThread me;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const u32 first = first_of(step * 16 + me.lane() % 16);
            if constexpr (kHalves == 1) {
                asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                             : "=r"(pairs[step][0][0]), "=r"(pairs[step][0][1])
                             : "r"(first)
                             : "memory");
            } else {
                // The upper lanes have the rows of the tile after.
#pragma unroll
                for (int t = 0; t < kHalves; t += 2)
                    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(pairs[step][t][0]), "=r"(pairs[step][t][1]), "=r"(pairs[step][t + 1][0]),
                                   "=r"(pairs[step][t + 1][1])
                                 : "r"(first ^ me.lane() / 16 * 16 ^ t * 16)
                                 : "memory");
            }
        }
    }

    // Add the weighted values of a step's 16 slots, and the weights themselves to `sums`.
    __device__ void add(float (&out)[kHalves][4], float (&sums)[4], const u32 (&weights)[4], int step) const {
#pragma unroll
        for (int t = 0; t < kHalves; ++t) mma_m16n8k16(out[t], weights, pairs[step][t][0], pairs[step][t][1]);
        mma_m16n8k16(sums, weights, kHalfOnes, kHalfOnes);
    }
};

// What attention_few.cuh takes as a split: keys go from their boxes to registers while the row is on its way, values
// behind the scores.
template <int kHeadDim>
struct BoxedSplit {
    static_assert(kHeadDim % kPanelChannels == 0, "whole panels");
    using S = Shape<kHeadDim>;
    using Ring = KvRing<kHeadDim>;
    using ValuesOf = BoxedValues<kHeadDim>;
    const Ring& ring;
    const KvPlace& own;   // this warp's, in shared memory
    RowsBeside<kHeadDim>& beside;
    const int num_known, num_slots;
    Keys<HalfRows<kHeadDim>> keys;

    // The split's first box.
    __device__ KvPlace first() const {
        int2 v;
        load_shared(v, shared_address(&own));
        return {v.x, v.y};
    }

    __device__ KvPlace first_value() const { return ring.step(first(), num_boxes()); }

    // To the next split's.
    __device__ void go_on(KvPlace& place) const {
        __syncwarp();
        if (this_thread() % kWarp == 0) place = ring.step(first_value(), num_boxes());
        __syncwarp();
    }

    __device__ int num_boxes() const { return (num_slots + kSubtile - 1) / kSubtile; }

    // Into registers, while the row is on its way: a ring of few slots has room for values then. Rows past those that
    // are known may be anything: nobody asks for their scores.
    __device__ void load_keys() {
        const FewThread me;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
            for (int run = 0; run < S::kKeyRuns; ++run) keys.of[t][run].clear();
            const int box = me.tile_slot(t) / kSubtile;
            if (box >= num_boxes()) continue;
            const KvPlace place = ring.step(first(), box);
            if (me.tile_slot(t) < num_slots) {
                ring.await(place);
                Panels<kHeadDim>::load_key(keys.of[t], ring.box(place), me.tile_slot(t) % kSubtile + me.quad());
            }
            ring.give_back(place, 1);
        }
    }

    __device__ void take_new(const HalfRow<kHeadDim>& key, int slot) {
        const FewThread me;
        if (me.has_key(slot)) keys.put(key, slot);
    }

    __device__ void keep_value(int d, float x) { beside.new_value.put(d, x); }
    __device__ void load(ValuesOf& values, int) const {
        const FewThread me;
        const int first_slot = me.subtile() * kSubtile;
        const int eight = me.value_warp() % Parts<kHeadDim>::kNum * ValuesOf::kHalves;
        const KvPlace place = ring.step(first_value(), me.subtile());
        const u32 box = ring.box(place), new_value = shared_address(&beside.new_value) + eight * 16,
                  zeros = shared_address(&beside.zeros) + eight * 16;
        ring.await(place);
        values.load([&](int slot) {
            return first_slot + slot < num_known   ? box + Panels<kHeadDim>::eight(slot, eight)
                   : first_slot + slot < num_slots ? new_value
                                                   : zeros;
        });
        ring.give_back(place, kKeyTakers / Parts<kHeadDim>::kNum);
    }
};
