// One row through every layer and lm_head in one launch (decode with everything resident).
//
// A block a multiprocessor stays for the whole token. One thread of it has the weights it will use copied, in the order it
// will use them, into a ring in shared memory by the bulk copy engine. The ring runs ahead over the waits between stages,
// so the memory does not rest while blocks wait for one another, and by few boxes at a time, so that their words do not
// wait long behind weights.
//
// What one stage hands to the next goes through device memory as flagged words: 32 bits of data beside the number of
// the stage that wrote them, stored and loaded together, so a reader polls the data itself and needs no other signal.
// A block with no part in a stage skips it. Flags are compared for equality, and no word is written again before all who
// wait for it have read it: what would be written next depends on what they make of it.
//
// The sums are those of gemv.cu to the bit: exact int32 dots of groups of 32, pieces of 128 inputs accumulated in
// ascending order, pieces added in ascending order; norms, activation codes and attention as in decode.cu, pointwise.cu
// and attention_few.cuh.
//
// The dots are integer sums that dp4a makes. mma would take fewer instructions, and a card whose multiprocessors all
// multiply integer matrices runs at a clock 5 % lower. Compute capability 9.0 alone: registers go from the warps that copy
// to those that sum, by an instruction of its own.

enum Counter { kLeft, kEpoch, kNumCounters };
constexpr int kCounterStride = 32;     // words between counters: one to a cache line

// A layer's stages: its linears, and attention behind the first.
constexpr int kAttentionStage = 1, kLayerStages = 5;

// Addresses of one layer beside its matrices, in the order the host writes them.
enum LayerPointer { kInputNorm, kPostNorm, kQNorm, kKNorm, kKeys, kValues, kLayerPointers };

// Everything a token needs; host and kernel share the order through the kernel's parameters.
struct Token {
    const u8* copy_maps;               // [4 * layers + 1][codes, scales] tensor maps of 128 bytes
    const u32* copy_order;             // [blocks][order_stride], as Ring's `copy_all` reads it
    const u64* pointers;               // [layers][kLayerPointers]
    const int* cuts;                   // [kNumKinds] Cut
    const float* final_norm_k;
    const void* table;                 // of embeddings; the row of this token begins at `first_entry`
    int table_kind;
    i64 first_entry;
    u64 *h_words, *qkv_words, *attended_words, *product_words;      // flagged; of codes: all codes, then all scales
    u64* half_words;                   // flagged: [num_halved][gate, up][columns]
    u64* split_words;                  // flagged, as FlaggedSplits has them
    float* logits_v;
    u32* counters;
    int num_layers, num_slots, most_on_their_way, order_stride, hidden, num_kv_heads, num_splits;
    RowAttention<HalfCache> attention; // of no layer yet

    __device__ float embedded(int i) const { return table_entry(table, table_kind, first_entry + i); }
};

// Dynamic shared memory in bytes from its start, behind the ring; `work` is what one stage at a time needs, attention or
// linear.
struct Room {
    int cuts, pointers, own_h, queries, work;
};

__device__ inline u32 load_acquire(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

// Codes and scales of up to kAtOnce groups a warp, one value a lane each: quantize_in_group for group
// `first` + g * kWarps, the divisions done once for all of them.
template <int kAtOnce>
__device__ inline void quantize_groups(int first, int num_groups, const float (&y)[kAtOnce], const Codes& to) {
    const int lane = this_thread() % kWarp;
    float inverse = 0.0f;
    u32 amax_bits = 0;
#pragma unroll
    for (int g = 0; g < kAtOnce; ++g) {
        const u32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(y[g]) & 0x7fffffffu);
        if (lane == g) amax_bits = bits;
    }
    float scale = div_rn(__uint_as_float(amax_bits), 127.0f);
    if (scale < kSmallestScale) scale = 0.0f;
    if (scale != 0.0f) inverse = div_rn(1.0f, scale);
#pragma unroll
    for (int g = 0; g < kAtOnce; ++g) {
        const int group = first + g * kWarps;
        const float inverse_g = __shfl_sync(0xffffffffu, inverse, g);
        if (group >= num_groups) break;
        store_shared(to.codes + group * kGroup + lane, (i8)__float2int_rn(mul_rn(y[g], inverse_g)));
        if (lane == g) store_shared(to.scales + group * 4, __float_as_uint(scale));
    }
}

// RMSNorm of the residual row and its activation codes, by every block for itself: norm.cu's sum. A thread holds inputs
// threadIdx.x + i * kThreads. The row is that of `epoch`, or the embedded one. `kIsFull`: all of a thread's parts are inputs.
template <int kParts, bool kIsFull>
__device__ inline void norm_parts(const Token& token, const float* weight_k, bool is_first, u32 epoch, const Codes& to) {
    __shared__ __align__(16) float scratch[kWarps];
    const int thread = this_thread();
    const int k = kIsFull ? kParts * kThreads : token.hidden;
    auto is_input = [&](int i) { return kIsFull || thread + i * kThreads < k; };
    float weight[kParts], h[kParts];
    auto load_weight = [&] {
#pragma unroll
        for (int i = 0; i < kParts; ++i) weight[i] = is_input(i) ? __ldg(weight_k + thread + i * kThreads) : 0.0f;
    };
    // Ahead of the row where there are registers for both.
    if (kParts <= 4) load_weight();
    if (is_first) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) h[i] = is_input(i) ? token.embedded(thread + i * kThreads) : 0.0f;
    } else {
        const u64* from = token.h_words + thread;
#pragma unroll
        for (int first = 0; first < kParts; first += 4) {
            Word word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) word[i] = {0, epoch};
            bool is_waiting;
            do {
                is_waiting = false;
#pragma unroll
                for (int i = 0; i < 4 && first + i < kParts; ++i)
                    if (is_input(first + i)) word[i].load(from + (first + i) * kThreads);
#pragma unroll
                for (int i = 0; i < 4; ++i) is_waiting |= !word[i].is_of(epoch);
            } while (is_waiting);
#pragma unroll
            for (int i = 0; i < 4 && first + i < kParts; ++i) h[first + i] = __uint_as_float(word[i].data);
        }
    }
    if (kParts > 4) load_weight();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum = fma_rn(h[i], h[i], sum);      // past the row's end are zeros
    sum = warp_sum(sum);
    // The barrier at the end keeps this from the next norm's.
    if (thread % kWarp == 0) scratch[thread / kWarp] = sum;
    sync_few();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum = add_rn(sum, scratch[w]);
    // By a power of two a product has the quotient's bits.
    constexpr bool kIsPower = kIsFull && (kParts & (kParts - 1)) == 0;
    const float mean = kIsPower ? mul_rn(sum, 1.0f / (kParts * kThreads)) : div_rn(sum, (float)k);
    const float rstd = __frsqrt_rn(add_rn(mean, token.attention.eps));
    const int num_groups = kIsFull ? kParts * kWarps : (k + kGroup - 1) / kGroup;
    constexpr int kAtOnce = kParts % 4 ? kParts : 4;
#pragma unroll
    for (int i = 0; i < kParts; i += kAtOnce) {
        float y[kAtOnce];
#pragma unroll
        for (int g = 0; g < kAtOnce; ++g) y[g] = mul_rn(weight[i + g], mul_rn(h[i + g], rstd));
        quantize_groups(thread / kWarp + i * kWarps, num_groups, y, to);
    }
    sync_few();
}

__device__ inline void norm_codes(const Token& token, const float* weight_k, bool is_first, u32 epoch, const Codes& to) {
    switch (token.hidden) {
        case 4 * kThreads: return norm_parts<4, true>(token, weight_k, is_first, epoch, to);
        case 5 * kThreads: return norm_parts<5, true>(token, weight_k, is_first, epoch, to);
        case 8 * kThreads: return norm_parts<8, true>(token, weight_k, is_first, epoch, to);
        default: return norm_parts<8, false>(token, weight_k, is_first, epoch, to);
    }
}

// Codes that other blocks made, as flagged words.
__device__ inline void await_codes(const u64* words, int num_groups, u32 epoch, const Codes& to) {
    // They may come where the warps that add the last stage's pieces still read.
    sync_few();
    const int num_words = num_groups * (kGroup / 4), num_all = num_words + num_groups;
    constexpr int kAtOnce = 4;
    for (int first = this_thread(); first < num_all; first += kAtOnce * kThreads) {
        // The first alone until it is there, then the others: their flags are hardly ever asked for in vain.
        Word word[kAtOnce];
        word[0].load(words + first);
        word[0].await(words + first, epoch);
#pragma unroll
        for (int k = 1; k < kAtOnce; ++k)
            if (first + k * kThreads < num_all) word[k].load(words + first + k * kThreads);
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const int i = first + k * kThreads;
            if (i >= num_all) break;
            // The scales come right behind the codes, here too.
            store_shared(to.codes + i * 4, word[k].await(words + i, epoch));
        }
    }
    sync_few();
}

// What attention reads of a layer, in shared memory and not in registers, which keys and values take. Of three layers in
// turn: warps may still read the last one's, and the next one's is set a barrier before it is read.
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
    __device__ FlaggedCodes codes() const {
        const int num_codes = token.num_kv_heads * token.attention.queries_per_kv * kHeadDim;
        return {token.attended_words, token.attended_words + num_codes / 4, epoch};
    }

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

// This block's splits of a layer's attention, if it has any, then what it merges of all.
template <int kHeadDim>
__device__ inline void attend(const Token& token, const RowAttention<HalfCache>& a, const Room& room, u32 epoch) {
    extern __shared__ __align__(kCopyAlignment) unsigned char bytes[];
    const AttentionWords<kHeadDim> words = {token, epoch};
    for (int unit = blockIdx.x; unit < token.num_kv_heads * a.used_splits(); unit += gridDim.x) {
        // The warps that add the last stage's pieces may still be at it where the weights will be, not where the queries are.
        auto& queries = *(FewQueries<kHeadDim, HalfRow<kHeadDim>>*)(bytes + room.queries);
        auto& few = *(FewWeights*)(bytes + room.work);
        float* parts = (float*)(bytes + room.work + sizeof(few));
        const int split = unit / token.num_kv_heads, kv_head = unit % token.num_kv_heads;
        attend_split_of_row<kHeadDim>(queries, few, parts, a, words, words, words, split, kv_head, [] {});
    }
    if (a.used_splits() == 1) return;
    // The last blocks have fewer splits.
    constexpr int kGroups = kHeadDim / kGroup;
    for (int i = gridDim.x - 1 - blockIdx.x; i < token.num_kv_heads * a.queries_per_kv * kGroups; i += gridDim.x)
        merge_group(*(MergeRoom*)(bytes + room.work), words.splits(), words.codes(), i / kGroups, i % kGroups, a.used_splits());
}

template <typename Weights, int kHeadDim>
__device__ inline void decode_token(const Token& given) {
#if COPIES_IN_BULK
    extern __shared__ __align__(kCopyAlignment) unsigned char bytes[];
    __shared__ Token token;
    __shared__ volatile int is_summing;
    auto ring = [&] { return Ring<Weights>{shared_address(bytes), token.num_slots}; };
    Ring<Weights>{shared_address(bytes), given.num_slots}.init();
    if (threadIdx.x == 0) token = given, is_summing = 0;
    __syncthreads();
    if (threadIdx.x >= kThreads) {
        give_registers_back<32>();
        if (threadIdx.x == kThreads) {
            // Before the first token; there is a block on every multiprocessor.
            if (load_acquire(token.counters + kEpoch * kCounterStride) == 0)
                for (int map = 0; map < 2 * (4 * token.num_layers + 1); ++map) see_new_map(token.copy_maps + map * 128);
            ring().copy_all(token.copy_maps, token.copy_order + blockIdx.x * token.order_stride, token.num_layers,
                            token.most_on_their_way, &is_summing);
        }
        return;
    }
    take_registers<112>();
    __shared__ Room room;
    __shared__ u32 first_epoch;
    __shared__ LayersAttention attention;
    // What a warp knows from stage to stage lies in shared memory: attention needs all registers, and what would be spilled
    // does not fit the first-level cache that is left.
    __shared__ typename Ring<Weights>::Place places[kWarps];
    __shared__ int stages[kWarps];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    auto cut_of = [&](int kind) -> const Cut& { return ((const Cut*)(bytes + room.cuts))[kind]; };
    auto counter = [&](int which) { return token.counters + which * kCounterStride; };
    if (threadIdx.x == 0) {
        const int own_rounds = (((const Cut*)token.cuts)[kO].num_sets + gridDim.x - 1) / gridDim.x;
        room.cuts = token.num_slots * (Ring<Weights>::kSlotBytes + 2 * 8);
        room.pointers = room.cuts + kNumKinds * (int)sizeof(Cut);
        room.own_h = room.pointers + token.num_layers * kLayerPointers * 8;
        room.queries = (room.own_h + own_rounds * kWarp * 4 + 15) / 16 * 16;
        room.work = room.queries + sizeof(FewQueries<kHeadDim, HalfRow<kHeadDim>>);
        first_epoch = load_acquire(counter(kEpoch));
        for (RowAttention<HalfCache>& a : attention.of) a = token.attention;
    }
    if (lane == 0) places[warp] = {}, stages[warp] = 0;
    sync_few();
    for (int i = threadIdx.x; i < kNumKinds * (int)(sizeof(Cut) / 4); i += kThreads)
        ((int*)(bytes + room.cuts))[i] = token.cuts[i];
    for (int i = threadIdx.x; i < token.num_layers * kLayerPointers; i += kThreads)
        ((u64*)(bytes + room.pointers))[i] = token.pointers[i];
    attention.set(0, token.pointers);
    sync_few();
    // The residual of the columns this block adds to: O and down are cut alike.
    if (warp == 0) {
        const Cut& cut = cut_of(kO);
        for (int set = blockIdx.x, round = 0; set < cut.num_sets; set += gridDim.x, ++round) {
            const int column = set * cut.set_columns + lane;
            float* own = (float*)(bytes + room.own_h) + round * kWarp + lane;
            if (lane < cut.width() && column < token.hidden) *own = token.embedded(column);
        }
    }

    while (true) {
        const int warp = this_thread() / kWarp, lane = this_thread() % kWarp;
        int stage;
        load_shared(stage, shared_address(&stages[warp]));
        const int layer = stage / kLayerStages, step = stage % kLayerStages;
        if (layer == token.num_layers && step > 0) break;
        __syncwarp();
        if (lane == 0) stages[warp] = stage + 1;
        __syncwarp();
        auto pointers = [&] { return (const u64*)(bytes + room.pointers) + layer * kLayerPointers; };
        // Words are written once a layer, those of the residual twice.
        auto epoch = [&] { return first_epoch + layer + 1; };
        auto h_epoch = [&] { return first_epoch + 2 * layer; };
        if (step == kAttentionStage) {
            if (layer + 1 < token.num_layers) attention.set(layer + 1, pointers() + kLayerPointers);
            attend<kHeadDim>(token, attention.of[layer % 3], room, epoch());
            continue;
        }
        const int kind = layer == token.num_layers ? kLmHead : step > kAttentionStage ? step - 1 : step;
        const Cut& cut = cut_of(kind);
        if ((int)blockIdx.x >= cut.num_whole()) continue;
        const int num_groups = cut.num_groups, input_bytes = cut.input_bytes();
        const u32 work = shared_address(bytes) + room.work;
        const Codes codes = {work, work + num_groups * kGroup};
        Summer<Weights> summer(ring(), cut, places[warp]);
        if (kind == kO || kind == kDown) {
            await_codes(kind == kO ? token.attended_words : token.product_words, num_groups, epoch(), codes);
        } else {
            const float* weight_k = kind == kLmHead ? token.final_norm_k
                                                    : (const float*)pointers()[kind == kQkv ? kInputNorm : kPostNorm];
            norm_codes(token, weight_k, stage == 0, h_epoch() + (kind == kGateUp), codes);
        }
        if (warp == 0 && lane == 0) is_summing = 1;
        summer.sum(codes, work + input_bytes, token.half_words, epoch(),
                 [&](int round, int set, int lane, float total, float up) {
            const int column = set * cut.set_columns + lane;
            const bool is_output = lane < cut.width() && column < cut.n;
            if (kind == kGateUp) {
                float scale;
                const int code = quantize_in_group(silu_mul(total, up), scale);
                const FlaggedCodes products = {token.product_words, token.product_words + cut.n / 8, epoch()};
                products.put(set, code, scale);
            } else if (kind == kO || kind == kDown) {
                float* own = (float*)(bytes + room.own_h) + round * kWarp + lane;
                if (is_output) {
                    const float h = *own = add_rn(*own, total);
                    publish(token.h_words + column, h, h_epoch() + (kind == kO ? 1 : 2));
                }
            } else if (kind == kQkv) {
                if (is_output) publish(token.qkv_words + column, total, epoch());
            } else if (is_output) {
                token.logits_v[column] = total;
            }
        });
        if (finisher() == 0 && lane == 0) is_summing = 0;
        if (lane == 0) places[warp] = summer.place;
    }
    // The block that leaves last makes room for the next token's counts and flags.
    sync_few();
    if (threadIdx.x == 0 && atomicAdd(counter(kLeft), 1) == gridDim.x - 1) {
        *counter(kLeft) = 0;
        *counter(kEpoch) = first_epoch + 2 * token.num_layers + 2;
    }
#endif
}

// `table` is of `table_kind` (common.cuh's table_entry). Of an embedded row, in float32, it is that row alone.
#define TOKEN(SUFFIX, WEIGHTS, HEAD_DIM)                                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads + kCopyThreads, 1)                                           \
    decode_token_##SUFFIX(const u8* copy_maps, const u32* copy_order, const u64* pointers, const int* cuts,            \
                          const float* final_norm_k, const void* table, const int* tokens, u64* h_words,               \
                          u64* qkv_words, u64* attended_words, u64* product_words, u64* half_words, u64* split_words,  \
                          float* logits_v, u32* counters, const float* cos_sd, const float* sin_sd,                    \
                          const int* position, int table_kind, int is_embedded, int num_layers, int num_slots,         \
                          int most_on_their_way, int order_stride, int hidden, int num_kv_heads, int num_splits,       \
                          int k_column, int v_column, int queries_per_kv, int ctx, float scale, float eps) {           \
        const int last = *position;                                                                                    \
        const i64 first_entry = is_embedded ? 0 : (i64)tokens[last] * hidden;                                          \
        const Token token = {copy_maps, copy_order, pointers, cuts, final_norm_k, table, table_kind, first_entry,      \
                             h_words, qkv_words, attended_words, product_words, half_words, split_words, logits_v,     \
                             counters, num_layers, num_slots, most_on_their_way, order_stride, hidden, num_kv_heads,   \
                             num_splits,                                                                               \
                             {nullptr, nullptr, cos_sd, sin_sd, {}, {}, last, k_column, v_column, queries_per_kv,      \
                              ctx, scale, eps}};                                                                       \
        decode_token<WEIGHTS, HEAD_DIM>(token);                                                                        \
    }
