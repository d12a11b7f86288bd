// What a linear of a token takes, as activation codes in shared memory: the norm of the residual, which every block
// makes for itself, or codes that other blocks made.

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
    if (scale != 0.0f) inverse = rcp_rn(scale);
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
// threadIdx.x + i * kThreads. The row is that of `epoch`, or the embedded one. `kIsFull`: all of a thread's parts are
// inputs.
template <int kParts, bool kIsFull>
__device__ inline void norm_parts(const Token& token, const float* weight_k, bool is_first, u32 epoch, const Codes& to) {
    __shared__ __align__(16) float scratch[kWarps];
    const int thread = this_thread();
    const int k = kIsFull ? kParts * kThreads : token.hidden;
    auto is_input = [&](int i) { return kIsFull || thread + i * kThreads < k; };
    float weight[kParts], h[kParts];
    const float eps = token.attention.eps;
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
    const float rstd = __frsqrt_rn(add_rn(mean, eps));
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
__device__ inline void await_codes(const WideWord* words, int num_groups, u32 epoch, const Codes& to) {
    // They may come where the warps that add the last stage's pieces still read.
    sync_few();
    constexpr int kAtOnce = 2;
    for (int first = this_thread(); first < num_groups * kWordsOfGroup; first += kAtOnce * kThreads) {
        WideWord word[kAtOnce];
        auto is_word = [&](int k) { return first + k * kThreads < num_groups * kWordsOfGroup; };
        bool is_waiting;
        do {
            is_waiting = false;
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                word[k].flag = epoch;
                if (is_word(k)) word[k].load(words + first + k * kThreads);
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) is_waiting |= word[k].flag != epoch;
        } while (is_waiting);
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            if (!is_word(k)) break;
            const int i = first + k * kThreads, group = i / kWordsOfGroup, part = i % kWordsOfGroup;
            const u32 codes = to.codes + group * kGroup + part * 12;
            store_shared(codes, word[k].data[0]), store_shared(codes + 4, word[k].data[1]);
            store_shared(part == kWordsOfGroup - 1 ? to.scales + group * 4 : codes + 8, word[k].data[2]);
        }
    }
    sync_few();
}
