// One row through every layer and lm_head in one launch (decode with everything resident).
//
// A block a multiprocessor stays for the whole token. One thread of it has the weights it will use copied, in the order it
// will use them, into a ring in shared memory by the bulk copy engine. The ring runs ahead over the waits between stages,
// so the memory does not rest while blocks wait for one another, and by few boxes at a time, so that their words do not
// wait long behind weights.
//
// What one stage hands to the next goes through device memory as flagged words: 32 bits of data beside the number of
// the stage that wrote them, stored and loaded together, so a reader polls the data itself and needs no other signal.
// A block with no part in a stage skips it; flags only grow, so it cannot wait for one that is gone.
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

// Addresses of one layer beside its matrices, in the order the host writes them.
enum LayerPointer { kInputNorm, kPostNorm, kQNorm, kKNorm, kKeys, kValues, kLayerPointers };

// Everything a token needs; host and kernel share the order through the kernel's parameters.
struct Token {
    const u8* copy_maps;               // [4 * layers + 1][codes, scales] tensor maps of 128 bytes
    const u32* copy_order;             // [blocks][order_stride], as Ring's `copy_all` reads it
    const u64* pointers;               // [layers][kLayerPointers]
    const int* cuts;                   // [kNumKinds] Cut
    const float* final_norm_k;
    const float* h_k;                  // the embedded row
    u64 *h_words, *qkv_words, *attended_words, *product_words;      // flagged; of codes: all codes, then all scales
    u64* half_words;                   // flagged: [num_halved][gate, up][columns]
    u64* split_words;                  // flagged, as FlaggedSplits has them
    float* logits_v;
    u32* counters;
    int num_layers, num_slots, most_on_their_way, order_stride, hidden, num_kv_heads, num_splits;
    RowAttention<HalfCache> attention; // of no layer yet
};

// Dynamic shared memory in bytes from its start, behind the ring; `work` is what one stage at a time needs, attention or
// linear.
struct Room {
    int cuts, pointers, own_h, work;
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
    const int lane = threadIdx.x % kWarp;
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
        to.codes[group * kGroup + lane] = (i8)max(-127, min(127, __float2int_rn(mul_rn(y[g], inverse_g))));
        if (lane == g) to.scales[group] = scale;
    }
}

// RMSNorm of the residual row and its activation codes, by every block for itself: norm.cu's sum. A thread holds inputs
// threadIdx.x + i * kThreads. The row is that of `epoch`, or the embedded one.
template <int kParts>
__device__ inline void norm_parts(const Token& token, const float* weight_k, bool is_first, u32 epoch, const Codes& to) {
    __shared__ __align__(16) float scratch[kWarps];
    const int k = token.hidden;
    auto is_input = [&](int i) { return (int)threadIdx.x + i * kThreads < k; };
    float weight[kParts], h[kParts];
    auto load_weight = [&] {
#pragma unroll
        for (int i = 0; i < kParts; ++i) weight[i] = is_input(i) ? __ldg(weight_k + threadIdx.x + i * kThreads) : 0.0f;
    };
    // Ahead of the row where there are registers for both.
    if (kParts <= 4) load_weight();
    if (is_first) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) h[i] = is_input(i) ? token.h_k[threadIdx.x + i * kThreads] : 0.0f;
    } else {
        const u64* from = token.h_words + threadIdx.x;
#pragma unroll
        for (int first = 0; first < kParts; first += 4) {
            Word word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (is_input(first + i)) word[i].load(from + (first + i) * kThreads);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u64* at = from + (first + i) * kThreads;
                h[first + i] = is_input(first + i) ? __uint_as_float(word[i].await(at, epoch)) : 0.0f;
            }
        }
    }
    if (kParts > 4) load_weight();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum = fma_rn(h[i], h[i], sum);      // past the row's end are zeros
    sum = warp_sum(sum);
    // The barrier at the end keeps this from the next norm's.
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = sum;
    sync_few();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum = add_rn(sum, scratch[w]);
    const float rstd = __frsqrt_rn(add_rn(div_rn(sum, (float)k), token.attention.eps));
    const int num_groups = (k + kGroup - 1) / kGroup;
    constexpr int kAtOnce = 4;
#pragma unroll
    for (int i = 0; i < kParts; i += kAtOnce) {
        float y[kAtOnce];
#pragma unroll
        for (int g = 0; g < kAtOnce; ++g) y[g] = mul_rn(weight[i + g], mul_rn(h[i + g], rstd));
        quantize_groups(threadIdx.x / kWarp + i * kWarps, num_groups, y, to);
    }
    sync_few();
}

__device__ inline void norm_codes(const Token& token, const float* weight_k, bool is_first, u32 epoch, const Codes& to) {
    if (token.hidden <= 4 * kThreads) norm_parts<4>(token, weight_k, is_first, epoch, to);
    else norm_parts<8>(token, weight_k, is_first, epoch, to);
}

// Codes that other blocks made, as flagged words.
__device__ inline void await_codes(const u64* words, int num_groups, u32 epoch, const Codes& to) {
    // They may come where the warps that add the last stage's pieces still read.
    sync_few();
    const int num_words = num_groups * (kGroup / 4), num_all = num_words + num_groups;
    constexpr int kAtOnce = 4;
    for (int first = threadIdx.x; first < num_all; first += kAtOnce * kThreads) {
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
            ((u32*)to.codes)[i] = word[k].await(words + i, epoch);
        }
    }
    sync_few();
}

// This block's splits of a layer's attention, if it has any.
template <int kHeadDim>
__device__ inline void attend(const Token& token, const u64* pointers, int work_at, u32 epoch, bool is_first_layer) {
    extern __shared__ __align__(kCopyAlignment) unsigned char bytes[];
    const int num_units = token.num_kv_heads * token.attention.used_splits();
    if ((int)blockIdx.x >= num_units) return;
    __shared__ RowAttention<HalfCache> a;        // not in registers, which keys and values take
    if (is_first_layer) {
        if (threadIdx.x == 0) a = token.attention;
        sync_few();
    }
    if (threadIdx.x < 2) (&a.q_norm_d)[threadIdx.x] = (const float*)pointers[kQNorm + threadIdx.x];
    else if (threadIdx.x < 4) (&a.k)[threadIdx.x - 2].stored = (u16*)pointers[kKeys + threadIdx.x - 2];
    // The warps that add the last stage's pieces may still be at it.
    sync_few();
    const FlaggedRow row = {token.qkv_words, epoch};
    const FlaggedSplits<kHeadDim> splits = {token.split_words, token.num_splits, epoch};
    const int num_codes = token.num_kv_heads * a.queries_per_kv * kHeadDim;
    const FlaggedCodes y = {token.attended_words, token.attended_words + num_codes / 4, epoch};
    for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
        using Few = FewRows<kHeadDim, HalfRow<kHeadDim>>;
        Few& few = *(Few*)(bytes + work_at);
        float* parts = (float*)(bytes + work_at + (sizeof(few) + 15) / 16 * 16);
        const int split = unit / token.num_kv_heads, kv_head = unit % token.num_kv_heads;
        attend_split_of_row<kHeadDim>(few, parts, a, row, splits, y, split, kv_head, [] {});
        sync_few();
    }
}

template <typename Weights, int kHeadDim>
__device__ inline void decode_token(const Token& given) {
#if COPIES_IN_BULK
    extern __shared__ __align__(kCopyAlignment) unsigned char bytes[];
    __shared__ Token token;
    __shared__ volatile int is_summing;
    const Ring<Weights> ring(shared_address(bytes), given.num_slots);
    ring.init();
    if (threadIdx.x == 0) token = given, is_summing = 0;
    __syncthreads();
    const int num_layers = token.num_layers, num_stages = 4 * num_layers + 1;
    if (threadIdx.x >= kThreads) {
        give_registers_back<32>();
        if (threadIdx.x == kThreads) {
            // Before the first token; there is a block on every multiprocessor.
            if (load_acquire(token.counters + kEpoch * kCounterStride) == 0)
                for (int map = 0; map < 2 * num_stages; ++map) see_new_map(token.copy_maps + map * 128);
            ring.copy_all(token.copy_maps, token.copy_order + blockIdx.x * token.order_stride, num_layers,
                          token.most_on_their_way, &is_summing);
        }
        return;
    }
    take_registers<112>();
    __shared__ Room room;
    __shared__ u32 first_epoch;
    // Between stages a warp's place in the ring lies here, not in registers that attention needs.
    __shared__ typename Ring<Weights>::Place places[kWarps];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, hidden = token.hidden;
    auto cut_of = [&](int kind) -> const Cut& { return ((const Cut*)(bytes + room.cuts))[kind]; };
    auto counter = [&](int which) { return token.counters + which * kCounterStride; };
    if (threadIdx.x == 0) {
        const int own_rounds = (((const Cut*)token.cuts)[kO].num_sets + gridDim.x - 1) / gridDim.x;
        room.cuts = token.num_slots * (Ring<Weights>::kSlotBytes + 2 * 8);
        room.pointers = room.cuts + kNumKinds * (int)sizeof(Cut);
        room.own_h = room.pointers + num_layers * kLayerPointers * 8;
        room.work = (room.own_h + own_rounds * kWarp * 4 + 15) / 16 * 16;
        first_epoch = load_acquire(counter(kEpoch));
    }
    if (lane == 0) places[warp] = {};
    sync_few();
    for (int i = threadIdx.x; i < kNumKinds * (int)(sizeof(Cut) / 4); i += kThreads)
        ((int*)(bytes + room.cuts))[i] = token.cuts[i];
    for (int i = threadIdx.x; i < num_layers * kLayerPointers; i += kThreads)
        ((u64*)(bytes + room.pointers))[i] = token.pointers[i];
    sync_few();
    // The residual of the columns this block adds to: O and down are cut alike.
    if (warp == 0) {
        const Cut& cut = cut_of(kO);
        for (int set = blockIdx.x, round = 0; set < cut.num_sets; set += gridDim.x, ++round) {
            const int column = set * cut.set_columns + lane;
            float* own = (float*)(bytes + room.own_h) + round * kWarp + lane;
            if (lane < cut.width() && column < hidden) *own = token.h_k[column];
        }
    }

    for (int stage = 0; stage < num_stages; ++stage) {
        const int layer = stage / 4;
        const int kind = stage == num_stages - 1 ? kLmHead : stage % 4;
        auto pointers = [&] { return (const u64*)(bytes + room.pointers) + layer * kLayerPointers; };
        // Words are written once a layer, those of the residual twice.
        auto epoch = [&] { return first_epoch + layer + 1; };
        auto h_epoch = [&] { return first_epoch + 2 * layer; };
        if (kind == kO) attend<kHeadDim>(token, pointers(), room.work, epoch(), layer == 0);
        const Cut& cut = cut_of(kind);
        if ((int)blockIdx.x >= cut.num_whole()) continue;
        const int num_groups = cut.num_groups, input_bytes = cut.input_bytes();
        const Codes codes = {(i8*)(bytes + room.work), (float*)(bytes + room.work + num_groups * kGroup)};
        Summer<Weights> summer(ring, cut, places[warp]);
        if (kind == kO || kind == kDown) {
            await_codes(kind == kO ? token.attended_words : token.product_words, num_groups, epoch(), codes);
        } else {
            const float* weight_k = kind == kLmHead ? token.final_norm_k
                                                    : (const float*)pointers()[kind == kQkv ? kInputNorm : kPostNorm];
            norm_codes(token, weight_k, stage == 0, h_epoch() + (kind == kGateUp), codes);
        }
        if (threadIdx.x == 0) is_summing = 1;
        summer.sum(codes, (float*)(bytes + room.work + input_bytes), token.half_words, epoch(),
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
        if (threadIdx.x == 0) is_summing = 0;
        if (lane == 0) places[warp] = summer.place;
        __syncwarp();
    }
    // The block that leaves last makes room for the next token's counts and flags.
    sync_few();
    if (threadIdx.x == 0 && atomicAdd(counter(kLeft), 1) == gridDim.x - 1) {
        *counter(kLeft) = 0;
        *counter(kEpoch) = first_epoch + 2 * num_layers + 2;
    }
#endif
}

#define TOKEN(SUFFIX, WEIGHTS, HEAD_DIM)                                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads + kCopyThreads, 1)                                           \
    decode_token_##SUFFIX(const u8* copy_maps, const u32* copy_order, const u64* pointers, const int* cuts,            \
                          const float* final_norm_k, const float* h_k, u64* h_words, u64* qkv_words,                   \
                          u64* attended_words, u64* product_words, u64* half_words, u64* split_words,                  \
                          float* logits_v, u32* counters, const float* cos_sd, const float* sin_sd,                    \
                          const int* position, int num_layers, int num_slots, int most_on_their_way,                   \
                          int order_stride, int hidden, int num_kv_heads, int num_splits, int k_column,                \
                          int v_column, int queries_per_kv, int ctx, float scale, float eps) {                         \
        const Token token = {copy_maps, copy_order, pointers, cuts, final_norm_k, h_k, h_words, qkv_words,             \
                             attended_words, product_words, half_words, split_words, logits_v, counters,               \
                             num_layers, num_slots, most_on_their_way, order_stride, hidden, num_kv_heads, num_splits, \
                             {nullptr, nullptr, cos_sd, sin_sd, {}, {}, *position, k_column, v_column,                 \
                              queries_per_kv, ctx, scale, eps}};                                                       \
        decode_token<WEIGHTS, HEAD_DIM>(token);                                                                        \
    }
