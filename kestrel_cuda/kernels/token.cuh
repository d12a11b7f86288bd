// One row through every layer and lm_head in one launch (decode with everything resident).
//
// A block a multiprocessor stays for the whole token. One thread of it has the weights it will use copied, in the order
// it will use them, into a ring in shared memory by the bulk copy engine; where there is room another does so with the
// keys and values it will attend to. The rings run ahead over the waits between stages, so the memory
// does not rest while blocks wait for one another, and by few boxes at a time, so that their words do not wait long
// behind them.
//
// What one stage hands to the next goes through device memory as flagged words: 32 or 96 bits of data beside the number
// of the stage that wrote them, stored and loaded together, so a reader polls the data itself and needs no other
// signal. A block with no part in a stage skips it. Flags are compared for equality, and no word is written again
// before all who wait for it have read it: what would be written next depends on what they make of it.
//
// The sums are those of gemv.cu to the bit: exact int32 dots of groups of 32, pieces of 128 inputs accumulated in
// ascending order, pieces added in ascending order; norms, activation codes and attention as in decode.cu, pointwise.cu
// and attention_few.cuh.
//
// The dots are integer sums that dp4a makes. mma would take fewer instructions, and a card whose multiprocessors all
// multiply integer matrices runs at a clock 5 % lower. Compute capability 9.0 alone: registers go from the warps that
// copy to those that sum, by an instruction of its own.

template <typename Weights, int kHeadDim, Context kContext>
__device__ inline void decode_token(const Token& given) {
#if COPIES_IN_BULK
    using Layer = Stages<kContext>;
    constexpr bool kIsBoxed = kContext != Context::kHeld;
    using Boxes = Boxes<kHeadDim, kContext>;
    using KvRing = typename BoxesOf<kHeadDim, kContext>::Ring;
    extern __shared__ __align__(kCopyAlignment) unsigned char bytes[];
    __shared__ Token token;
    __shared__ volatile int is_summing;
    __shared__ u64 barriers[2 * kMostSlots];
    auto ring_of = [&](const Token& token) {
        return Ring<Weights>{shared_address(bytes), shared_address(barriers), token.num_slots};
    };
    auto ring = [&] { return ring_of(token); };
    __shared__ u64 kv_barriers[2 * kMostKvSlots];
    __shared__ RowsBeside<kHeadDim> beside;
    __shared__ u32 first_box, first_epoch;
    auto boxes_of = [&](const Token& token) {
        return KvRing{first_box, shared_address(kv_barriers), token.num_kv_slots};
    };
    ring_of(given).init();
    if constexpr (kIsBoxed) {
        boxes_of(given).init();
        if (threadIdx.x < kHeadDim) beside.zeros.stored[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
        token = given, is_summing = 0;
        first_box = shared_address(bytes) + given.num_slots * Ring<Weights>::kSlotBytes;
        // Before anyone else of this block goes on: once the last block has left it is another.
        first_epoch = load_acquire(given.counters + kEpoch * kCounterStride);
    }
    __syncthreads();
    if (threadIdx.x >= kThreads) {
        give_registers_back<32>();
        // Before the first token, whichever form takes it; there is a block on every multiprocessor.
        auto see_new_maps = [&](int first, int end) {
            if (first_epoch == 0)
                for (; first < end; ++first) see_new_map(token.copy_maps + first * 128);
        };
        if (threadIdx.x == kThreads) {
            see_new_maps(0, kIsBoxed ? token.kv_map(0) : token.kv_map(token.num_layers));
            ring().copy_all(token.copy_maps, token.copy_order + blockIdx.x * token.order_stride, token.num_layers,
                            token.most_on_their_way, &is_summing);
        }
        if constexpr (kIsBoxed)
            if (threadIdx.x == kThreads + kWarp) {
                see_new_maps(token.kv_map(0), token.kv_map(token.num_layers));
                boxes_of(token).copy_all(token.copy_maps + token.kv_map(0) * 128, token.num_layers, token.num_kv_heads,
                                         token.attention.last, first_unit());
            }
        return;
    }
    take_registers<112>();
    __shared__ Room room;
    __shared__ LayersAttention attention;
    // What a warp knows from stage to stage.
    __shared__ typename Ring<Weights>::Place places[kWarps];
    __shared__ KvPlace kv_places[kWarps];
    __shared__ int stages[kWarps];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    auto cut_of = [&](int kind) -> const Cut& { return ((const Cut*)(bytes + room.cuts))[kind]; };
    auto counter = [&](int which) { return token.counters + which * kCounterStride; };
    if (threadIdx.x == 0) {
        const int own_rounds = (((const Cut*)token.cuts)[kO].num_sets + gridDim.x - 1) / gridDim.x;
        room.cuts = token.num_slots * Ring<Weights>::kSlotBytes + token.num_kv_slots * KvRing::kBoxBytes;
        room.pointers = room.cuts + kNumKinds * (int)sizeof(Cut);
        room.own_h = room.pointers + token.num_layers * kLayerPointers * 8;
        room.queries = (room.own_h + own_rounds * kWarp * 4 + 15) / 16 * 16;
        room.work = room.queries + sizeof(FewQueries<kHeadDim, HalfRow<kHeadDim>>);
        for (RowAttention<HalfCache>& a : attention.of) a = token.attention;
    }
    if (lane == 0) places[warp] = {}, kv_places[warp] = {}, stages[warp] = 0;
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

    // Words are written once a layer, those of the residual twice.
    auto epoch_of = [&](int layer) { return first_epoch + layer + 1; };
    auto h_epoch_of = [&](int layer) { return first_epoch + 2 * layer; };
    auto kind_of = [&](int stage) {
        return stage >= token.num_layers * Layer::kLayer ? kLmHead : Layer::kind(stage % Layer::kLayer);
    };
    auto pointers_of = [&](int layer) { return (const u64*)(bytes + room.pointers) + layer * kLayerPointers; };
    auto attend_to = [&](int layer) {
        if (layer + 1 < token.num_layers) attention.set(layer + 1, pointers_of(layer + 1));
        const Boxes boxes = {boxes_of(token), kv_places[this_thread() / kWarp], beside};
        attend<kHeadDim, kContext>(token, attention.of[layer % 3], boxes, room, epoch_of(layer));
    };
    // The stage that a warp is in, from shared memory, so that no register has to say it meanwhile.
    auto stage_now = [&] {
        int stage_after;
        load_shared(stage_after, shared_address(&stages[this_thread() / kWarp]));
        return stage_after - 1;
    };

    // A block's sets of a stage's linear, from its input to what they are handed on as.
    auto sum_linear = [&](int stage) {
        const int warp = this_thread() / kWarp, lane = this_thread() % kWarp;
        const int layer = stage / Layer::kLayer, kind = kind_of(stage);
        const Cut& cut = cut_of(kind);
        if ((int)blockIdx.x >= cut.num_whole()) return;
        const int num_groups = cut.num_groups, input_bytes = cut.input_bytes();
        const u32 work = shared_address(bytes) + room.work;
        const Codes codes = {work, work + num_groups * kGroup};
        Summer<Weights> summer(ring(), cut, places[warp], work + input_bytes);
        if (kind == kO || kind == kDown) {
            await_codes(kind == kO ? token.attended_words : token.product_words, num_groups, epoch_of(layer), codes);
        } else {
            const int norm = kind == kQkv ? kInputNorm : kPostNorm;
            const float* weight_k = kind == kLmHead ? token.final_norm_k : (const float*)pointers_of(layer)[norm];
            norm_codes(token, weight_k, stage == 0, h_epoch_of(layer) + (kind == kGateUp), codes);
        }
        if (warp == 0 && lane == 0) is_summing = 1;
        auto epoch_now = [&] { return epoch_of(stage_now() / Layer::kLayer); };
        summer.sum(codes, token.half_words, epoch_now,
                   [&](int round, int set, int lane) {
            const int stage = stage_now(), layer = stage / Layer::kLayer, kind = kind_of(stage);
            const int column = set * cut.set_columns + lane;
            const bool is_output = lane < cut.width() && column < cut.n, adds = kind == kO || kind == kDown;
            u64* const to = adds ? token.h_words : kind == kQkv ? token.qkv_words : (u64*)token.product_words;
            const u32 epoch = adds ? h_epoch_of(layer) + (kind == kO ? 1 : 2) : epoch_of(layer);
            const u32 own = shared_address(bytes) + room.own_h + (round * kWarp + lane) * 4;
            float h = 0.0f;
            if (adds) load_shared(h, own);
            return [=](float total, float up) {
                if (kind == kGateUp) {
                    float scale;
                    const int code = quantize_in_group(silu_mul(total, up), scale);
                    FlaggedCodes{(WideWord*)to, epoch}.put(set, code, scale);
                } else if (adds) {
                    if (!is_output) return;
                    const float sum = add_rn(h, total);
                    publish(to + column, sum, epoch);
                    store_shared(own, __float_as_uint(sum));
                } else if (kind == kQkv) {
                    if (is_output) publish(to + column, total, epoch);
                } else if (is_output) {
                    token.logits_v[column] = total;
                }
            };
        });
        const int thread = this_thread();
        if (thread == 0) is_summing = 0;
        if (thread % kWarp == 0) places[thread / kWarp] = summer.place;
    };

    while (true) {
        const int warp = this_thread() / kWarp, lane = this_thread() % kWarp;
        int stage;
        load_shared(stage, shared_address(&stages[warp]));
        if (stage > token.num_layers * Layer::kLayer) break;
        __syncwarp();
        if (lane == 0) stages[warp] = stage + 1;
        __syncwarp();
        if constexpr (Layer::kMerges) {
            const int layer = stage / Layer::kLayer, step = stage % Layer::kLayer;
            if (step == Layer::kAttention) {
                attend_to(layer);
                continue;
            }
            if (step == Layer::kMerge) {
                merge_splits<kHeadDim>(token, room, epoch_of(layer));
                continue;
            }
        }
        sum_linear(stage);
        if constexpr (!Layer::kMerges) {
            const int stage = stage_now(), layer = stage / Layer::kLayer;
            if (stage % Layer::kLayer == kQkv && layer < token.num_layers) attend_to(layer);
        }
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
#define TOKEN(SUFFIX, WEIGHTS, HEAD_DIM, CONTEXT)                                                                      \
    extern "C" __global__ void __launch_bounds__(kThreads + kCopyThreads, 1)                                           \
    decode_token_##SUFFIX(const u8* copy_maps, const u32* copy_order, const u64* pointers, const int* cuts,            \
                          const float* final_norm_k, const void* table, const int* tokens, u64* h_words,               \
                          u64* qkv_words, u64* attended_words, u64* product_words, u64* half_words, u64* split_words,  \
                          float* logits_v, u32* counters, const float* cos_sd, const float* sin_sd,                    \
                          const int* position, int table_kind, int is_embedded, int num_layers, int num_slots,         \
                          int num_kv_slots, int most_on_their_way, int order_stride, int hidden, int num_kv_heads,     \
                          int num_splits, int k_column, int v_column, int queries_per_kv, int ctx, float scale,        \
                          float eps) {                                                                                 \
        const int last = *position;                                                                                    \
        const i64 first_entry = is_embedded ? 0 : (i64)tokens[last] * hidden;                                          \
        const Token token = {copy_maps, copy_order, pointers, cuts, final_norm_k, table, table_kind, first_entry,      \
                             h_words, qkv_words, (WideWord*)attended_words, (WideWord*)product_words, half_words,      \
                             split_words, logits_v, counters, num_layers, num_slots, num_kv_slots,                     \
                             most_on_their_way, order_stride, hidden, num_kv_heads, num_splits,                        \
                             {nullptr, nullptr, cos_sd, sin_sd, {}, {}, last, k_column, v_column, queries_per_kv,      \
                              ctx, scale, eps}};                                                                       \
        decode_token<WEIGHTS, HEAD_DIM, Context::CONTEXT>(token);                                                      \
    }
