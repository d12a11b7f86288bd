// Words that carry a flag beside their data, by which the blocks of one launch hand values to one another: 32 bits of
// either, or 96 of data, stored and loaded together. A reader polls the data itself. Knows nothing of what is handed
// on.

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

// Three words of data with one flag.
struct __align__(16) WideWord {
    u32 data[3], flag;

    __device__ void publish(WideWord* to) const {
        asm volatile(
            "{ .reg .b64 low, high; .reg .b128 word; mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4};"
            " mov.b128 word, {low, high}; st.relaxed.gpu.global.b128 [%0], word; }" ::"l"(to),
            "r"(data[0]), "r"(data[1]), "r"(data[2]), "r"(flag)
            : "memory");
    }

    __device__ void load(const WideWord* from) {
        asm volatile(
            "{ .reg .b64 low, high; .reg .b128 word; ld.relaxed.gpu.global.b128 word, [%4]; mov.b128 {low, high}, word;"
            " mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }"
            : "=r"(data[0]), "=r"(data[1]), "=r"(data[2]), "=r"(flag)
            : "l"(from)
            : "memory");
    }
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

// Activation codes as flagged words: eight of four codes and the scale are three wide ones.
constexpr int kWordsOfGroup = 3;

struct FlaggedCodes {
    WideWord* words;
    u32 epoch;

    __device__ void put(int group, int code, float scale) const {
        const u32 byte = code & 0xff, lane = this_thread() % kWarp;
        const u32 pair = byte | __shfl_down_sync(0xffffffffu, byte, 1) << 8;
        const u32 four = pair | __shfl_down_sync(0xffffffffu, pair, 2) << 16;
        WideWord word = {{}, epoch};
#pragma unroll
        for (int i = 0; i < 3; ++i) word.data[i] = __shfl_sync(0xffffffffu, four, lane * 12 + i * 4);
        if (lane == kWordsOfGroup - 1) word.data[2] = __float_as_uint(scale);
        if (lane < kWordsOfGroup) word.publish(words + group * kWordsOfGroup + lane);
    }
};
