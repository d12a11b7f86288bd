// A token's attention to one layer: which block attends to which splits, what it is handed and hands on.

// What attention reads of a layer, in shared memory and not in registers, which keys and values take. Of three layers
// in turn: warps may still read the last one's, and the next one's is set a barrier before it is read.
struct LayersAttention {
    RowAttention<HalfCache> of[3];

    __device__ void set(int layer, const u64* pointers) {
        const int i = this_thread();
        if (i >= 4) return;
        RowAttention<HalfCache>& a = of[layer % 3];
        if (i < 2) (&a.q_norm_d)[i] = (const float*)pointers[kQNorm + i];
        else (&a.k)[i - 2].stored = (u16*)pointers[kKeys + i - 2];
    }
};

// What attention is handed and hands on. The addresses lie in shared memory until they are used, for the same reason.
template <int kHeadDim>
struct AttentionWords {
    static constexpr bool kMergesHere = false;
    const Token& token;
    u32 epoch;

    __device__ FlaggedSplits<kHeadDim> splits() const { return {token.split_words, token.num_splits, epoch}; }
    __device__ FlaggedCodes codes() const { return {token.attended_words, epoch}; }

    template <int kChannels>
    __device__ void load(float (&x)[kChannels], int column, int count) const {
        FlaggedRow{token.qkv_words, epoch}.load(x, column, count);
    }
    __device__ void put(int head, int split, int d, float out) const { splits().put(head, split, d, out); }
    __device__ void put_weights(int head, int split, float max, float sum) const {
        splits().put_weights(head, split, max, sum);
    }
    __device__ void put(int group, int code, float scale) const { codes().put(group, code, scale); }
};

// A split of a kv head is a unit; of a context of one split a slice of it. The last blocks, which have the least of
// everything else to do, have the first.
__device__ inline int first_unit() { return gridDim.x - 1 - blockIdx.x; }

// The ring that a kernel's attention takes boxes from.
template <int kHeadDim, Context kContext>
struct BoxesOf {
    using Ring = KvRing<kHeadDim>;
};

template <int kHeadDim>
struct BoxesOf<kHeadDim, Context::kOneSplit> {
    using Ring = SliceRing<kHeadDim>;
};

// What a block attends to its splits with, but for what every kernel has.
template <int kHeadDim, Context kContext>
struct Boxes {
    typename BoxesOf<kHeadDim, kContext>::Ring ring;
    KvPlace& place;                    // this warp's next box
    RowsBeside<kHeadDim>& beside;
};

// This block's splits of a layer's attention, if it has any, or slices of the one there is.
template <int kHeadDim, Context kContext>
__device__ inline void attend(const Token& token, const RowAttention<HalfCache>& a,
                              const Boxes<kHeadDim, kContext>& boxes, const Room& room, u32 epoch) {
    extern __shared__ __align__(kCopyAlignment) unsigned char bytes[];
    const AttentionWords<kHeadDim> words = {token, epoch};
    // The warps that add the last stage's pieces may still be at it where the weights will be, not where the queries
    // are.
    if constexpr (kContext == Context::kOneSplit) {
        for (int unit = first_unit(); unit < token.num_kv_heads * SliceRing<kHeadDim>::kNumSlices; unit += gridDim.x) {
            int kv_head = unit, slice = 0;
            for (; kv_head >= token.num_kv_heads; ++slice) kv_head -= token.num_kv_heads;
            auto& queries = *(SliceQueries<kHeadDim>*)(bytes + room.queries);
            auto& weights = *(SliceWeights*)(bytes + room.work);
            attend_slice<kHeadDim>(queries, weights, boxes.ring, boxes.place, a, words, kv_head, slice);
        }
        return;
    }
    // Not reckoned ahead: registers are scarce.
    auto num_units = [&] { return token.num_kv_heads * a.used_splits(); };
    for (int unit = first_unit(); unit < num_units(); unit += gridDim.x) {
        auto& queries = *(FewQueries<kHeadDim, HalfRow<kHeadDim>>*)(bytes + room.queries);
        auto& few = *(FewWeights*)(bytes + room.work);
        float* parts = (float*)(bytes + room.work + sizeof(few));
        const int split = unit / token.num_kv_heads, kv_head = unit % token.num_kv_heads;
        if constexpr (kContext == Context::kBoxed) {
            BoxedSplit<kHeadDim> held = {boxes.ring, boxes.place, boxes.beside, a.num_known(split), a.num_slots(split)};
            held.load_keys();
            attend_split_of_row<kHeadDim>(queries, few, parts, held, a, words, words, words, split, kv_head, [] {});
            held.go_on(boxes.place);
        } else {
            const i64 at = a.template at<kHeadDim>(split, kv_head);
            HeldSplit<kHeadDim, HalfRows<kHeadDim>> held(a.k.template from<kHeadDim>(at), a.v.template from<kHeadDim>(at),
                                                         a.num_known(split));
            attend_split_of_row<kHeadDim>(queries, few, parts, held, a, words, words, words, split, kv_head, [] {});
        }
    }
}

// What this block merges of all splits, where there is more than one. The first blocks attend to fewer of them.
template <int kHeadDim>
__device__ inline void merge_splits(const Token& token, const Room& room, u32 epoch) {
    extern __shared__ __align__(kCopyAlignment) unsigned char bytes[];
    const AttentionWords<kHeadDim> words = {token, epoch};
    const int used_splits = token.attention.used_splits();
    if (used_splits == 1) return;
    constexpr int kGroups = kHeadDim / kGroup;
    for (int i = blockIdx.x; i < token.num_kv_heads * token.attention.queries_per_kv * kGroups; i += gridDim.x)
        merge_group(*(MergeRoom*)(bytes + room.work), words.splits(), words.codes(), i / kGroups, i % kGroups, used_splits);
}
