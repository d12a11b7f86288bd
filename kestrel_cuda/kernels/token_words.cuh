// Words that carry a flag beside their data, by which the blocks of one launch hand values to one another: 32 bits each,
// stored and loaded together. A reader polls the data itself. Knows nothing of what is handed on.

__device__ inline void publish(u64* to, u32 data, u32 epoch) {
    asm volatile("{ .reg .b64 word; mov.b64 word, {%1, %2}; st.relaxed.gpu.global.b64 [%0], word; }" ::"l"(to), "r"(data),
                 "r"(epoch)
                 : "memory");
}

__device__ inline void publish(u64* to, float data, u32 epoch) { publish(to, __float_as_uint(data), epoch); }

struct Word {
    u32 data, flag;

    __device__ void load(const u64* from) {
        asm volatile("{ .reg .b64 word; ld.relaxed.gpu.global.b64 word, [%2]; mov.b64 {%0, %1}, word; }"
                     : "=r"(data), "=r"(flag)
                     : "l"(from)
                     : "memory");
    }

    __device__ u32 await(const u64* from, u32 epoch) {
        while (!is_of(epoch)) load(from);
        return data;
    }

    // None is written again before everyone has read it, and one that was not written for long has some older flag.
    __device__ bool is_of(u32 epoch) const { return flag == epoch; }
};

// The projections of a row as flagged words.
struct FlaggedRow {
    const u64* words;
    u32 epoch;

    template <int kChannels>
    __device__ void load(float (&x)[kChannels], int column, int count) const {
        const int lane = this_thread() % kWarp;
        const u64* from = words + column + lane;
        Word word[kChannels];
#pragma unroll
        for (int i = 0; i < kChannels; ++i) word[i] = {0, epoch};
        // All again until all are there: one after the other each late one would cost a trip to memory.
        bool is_waiting;
        do {
            is_waiting = false;
#pragma unroll
            for (int i = 0; i < kChannels; ++i)
                if (lane + i * kWarp < count) word[i].load(from + i * kWarp);
#pragma unroll
            for (int i = 0; i < kChannels; ++i) is_waiting |= !word[i].is_of(epoch);
        } while (is_waiting);
#pragma unroll
        for (int i = 0; i < kChannels; ++i) x[i] = __uint_as_float(word[i].data);
    }
};

// What the splits of a head hand on, as flagged words [heads][num_splits][d, then maximum and sum], for others to merge
// (token_merge.cuh).
template <int kHeadDim>
struct FlaggedSplits {
    u64* words;
    int num_splits;
    u32 epoch;

    __device__ u64* at(int head, int split) const { return words + ((i64)head * num_splits + split) * (kHeadDim + 2); }
    __device__ void put(int head, int split, int d, float out) const { publish(at(head, split) + d, out, epoch); }
    __device__ void put_weights(int head, int split, float max, float sum) const {
        publish(at(head, split) + kHeadDim, max, epoch), publish(at(head, split) + kHeadDim + 1, sum, epoch);
    }
};

// Activation codes as flagged words: four codes a word, and a word for each scale.
struct FlaggedCodes {
    u64 *codes, *scales;
    u32 epoch;

    __device__ void put(int group, int code, float scale) const {
        const u32 byte = code & 0xff, lane = this_thread() % kWarp;
        const u32 pair = byte | __shfl_down_sync(0xffffffffu, byte, 1) << 8;
        const u32 word = pair | __shfl_down_sync(0xffffffffu, pair, 2) << 16;
        if (lane % 4 == 0) publish(codes + group * (kGroup / 4) + lane / 4, word, epoch);
        if (lane == 0) publish(scales + group, scale, epoch);
    }
};
