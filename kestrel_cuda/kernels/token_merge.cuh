// What the splits of a head hand on, as flagged words, merged by all blocks in turn: a group of 32 channels
// at a time, many splits fetched at once. RunningMerge's sums to the bit.

constexpr int kOwnSplits = 4;                          // of a warp at a time
constexpr int kMergedSplits = kOwnSplits * kFewWarps;  // of a block

// Of splits in shared memory, by the first warp: how what came before and the split itself are weighted.
struct SplitWeights {
    float keep, take, sum, max;
};

struct __align__(16) MergeRoom {
    SplitWeights weights[kMergedSplits];
    float out[kMergedSplits][kGroup];
};

static_assert(2 * kMergedSplits <= kFewThreads, "");

// Fetch `count` splits of a head from `first` on.
template <int kHeadDim>
__device__ inline void fetch_splits(MergeRoom& room, const FlaggedSplits<kHeadDim>& splits, int head, int group, int first,
                                    int count) {
    const FewThread me;
    const int warp = me.warp(), lane = me.lane();
    auto out_at = [&](int s) { return splits.at(head, first + s) + group * kGroup + lane; };
    // A split's maximum and sum are a thread's each.
    const int own_weight = me.index / 2;
    const u64* weight_at = splits.at(head, first + own_weight) + kHeadDim + me.index % 2;
    Word out[kOwnSplits], weight;
    if (own_weight < count) weight.load(weight_at);
#pragma unroll
    for (int i = 0; i < kOwnSplits; ++i) {
        const int s = warp + i * kFewWarps;
        if (s < count) out[i].load(out_at(s));
    }
    if (own_weight < count) {
        SplitWeights& to = room.weights[own_weight];
        (me.index % 2 ? to.sum : to.max) = __uint_as_float(weight.await(weight_at, splits.epoch));
    }
#pragma unroll
    for (int i = 0; i < kOwnSplits; ++i) {
        const int s = warp + i * kFewWarps;
        if (s >= count) break;
        room.out[s][lane] = __uint_as_float(out[i].await(out_at(s), splits.epoch));
    }
}

// Add them to what a warp has merged before, a channel a lane.
__device__ inline void add_splits(RunningMerge& merged, MergeRoom& room, int count) {
    const int lane = this_thread() % kWarp;
    for (int first = 0; first < count; first += kWarp) {
        // All maxima so far, of every split in turn.
        const float own = first + lane < count ? room.weights[first + lane].max : minus_infinity();
        float max = fmaxf(own, merged.max);
#pragma unroll
        for (int step = 1; step < kWarp; step *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, max, step);
            if (lane >= step) max = fmaxf(max, other);
        }
        float before = __shfl_up_sync(0xffffffffu, max, 1);
        if (lane == 0) before = merged.max;
        merged.max = __shfl_sync(0xffffffffu, max, kWarp - 1);
        float keep, take, merged_max;
        merge_weights(before, own, keep, take, merged_max);
        if (first + lane < count) room.weights[first + lane].keep = keep, room.weights[first + lane].take = take;
        __syncwarp();
        const int end = min(count, first + kWarp);
#pragma unroll 4
        for (int s = first; s < end; ++s) {
            const float4 w = *(const float4*)&room.weights[s];
            merged.sum = merge(merged.sum, w.x, w.z, w.y);
            merged.out = merge(merged.out, w.x, room.out[s][lane], w.y);
        }
    }
}

// One group of a head's channels, from its splits to activation codes. By every thread; what lay in `room` may still be
// read when it begins.
template <int kHeadDim>
__device__ inline void merge_group(MergeRoom& room, const FlaggedSplits<kHeadDim>& splits, const FlaggedCodes& y, int head,
                                   int group, int used_splits) {
    const bool adds = this_thread() < kWarp;
    RunningMerge merged;
    for (int first = 0; first < used_splits; first += kMergedSplits) {
        const int count = min(kMergedSplits, used_splits - first);
        sync_few();
        fetch_splits(room, splits, head, group, first, count);
        sync_few();
        if (adds) add_splits(merged, room, count);
    }
    if (!adds) return;
    float scale;
    const int code = quantize_in_group(div_rn(merged.out, merged.sum), scale);
    y.put(head * (kHeadDim / kGroup) + group, code, scale);
}
