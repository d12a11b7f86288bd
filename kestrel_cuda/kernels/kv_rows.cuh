// Rows of the key-value cache: float16 entries, or int8 codes with a float16 scale for 32 channels. quant/kv_rows.py is the
// definition of the latter; what is read of them are halves, so that attention goes on as over float16 entries.

constexpr int kCacheGroup = kGroup;                // channels that share a scale: one a lane
constexpr float kLargestCacheScale = 515.5f;       // the last whose 127-fold is a finite half

// Saturate what a half cannot hold; a NaN passes, so that it reaches the logits.
__device__ inline u16 saturated_half(float x) { return float_to_half(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); }

// The code of this lane's entry in a group of 32, and the scale to store. A NaN passes in the scale.
__device__ inline i8 quantize_entry(float x, u16& scale) {
    const u32 amax_bits = __reduce_max_sync(0xffffffffu, __float_as_uint(x) & 0x7fffffffu);
    const float exact = div_rn(__uint_as_float(amax_bits), 127.0f);
    scale = float_to_half(exact > kLargestCacheScale ? kLargestCacheScale : exact);
    const float stored = half_to_float(scale);
    return stored != 0.0f ? (i8)max(-127, min(127, __float2int_rn(mul_rn(x, div_rn(1.0f, stored))))) : (i8)0;
}

// Two of four codes, each with 128 added, as halves: 0x4140 takes the lower two, 0x4342 the upper.
__device__ inline u32 halves_of_codes(u32 biased, u32 which) {
    // 0x64xx is the half 1024 + xx; 0x6480 is 1152.
    u32 halves;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(__byte_perm(biased, 0x64646464u, which)), "r"(0x64806480u));
    return halves;
}

// Exact products rounded to halves: what float16(code * scale) is.
__device__ inline u32 scaled(u32 halves, u32 scales) {
    u32 products;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(products) : "r"(halves), "r"(scales));
    return products;
}

__device__ inline u32 biased_codes(u32 codes) { return codes ^ 0x80808080u; }

// The lower (which = 0) or upper half of a word, twice.
__device__ inline u32 twice(u32 word, int which) { return __byte_perm(word, 0u, which ? 0x3232 : 0x1010); }

// The lower (which = 0) or upper two of four codes as entries.
__device__ inline u32 entry_pair(u32 codes, int which, u32 scale_twice) {
    return scaled(halves_of_codes(biased_codes(codes), which ? 0x4342 : 0x4140), scale_twice);
}

// Codes of neighbouring channels as they lie in memory: 8, 4, 2 or 1 bytes.
template <int kCount>
struct CodeRun {
    static constexpr int kWords = (kCount + 3) / 4;
    u32 words[kWords];

    __device__ void load(const i8* from) {
        if constexpr (kCount == 8) {
            const uint2 v = *(const uint2*)from;
            words[0] = v.x, words[1] = v.y;
        } else if constexpr (kCount == 4) {
            words[0] = *(const u32*)from;
        } else if constexpr (kCount == 2) {
            words[0] = *(const u16*)from;
        } else {
            words[0] = *(const u8*)from;
        }
    }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = 0;
    }
};

// One row in shared memory, put together by a warp: 32 channels at a time, lane l those that are l modulo 32.
template <int kHeadDim>
struct HalfRow {
    u16 stored[kHeadDim];

    __device__ void put(int d, float x) { stored[d] = saturated_half(x); }
};

template <int kHeadDim>
struct Int8Row {
    i8 stored[kHeadDim];
    u16 scales[8];                     // head_dim / 32 of them, and what keeps the next row aligned

    __device__ void put(int d, float x) {
        u16 scale;
        stored[d] = quantize_entry(x, scale);
        if (d % kCacheGroup == 0) scales[d / kCacheGroup] = scale;
    }
};

// Have the first `num_bytes` from an address on in the second-level cache, a line a thread. Every thread of a block of enough
// takes part.
__device__ inline void prefetch_lines(const void* from, int num_bytes) {
    const int at = this_thread() * 128;
    if (at < num_bytes) asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8*)from + at));
}

// A kv head's rows from some slot on, to be read. Offsets into a cache count channels.
template <int kHeadDim>
struct HalfRows {
    using New = HalfRow<kHeadDim>;
    const u16* stored_sd;

    __device__ HalfRows from(i64 at) const { return {stored_sd + at}; }
    __device__ void prefetch(int num_slots) const { prefetch_lines(stored_sd, num_slots * kHeadDim * 2); }
};

template <int kHeadDim>
struct Int8Rows {
    using New = Int8Row<kHeadDim>;
    static constexpr int kGroups = kHeadDim / kCacheGroup;
    const i8* stored_sd;
    const u16* scales_sg;

    __device__ Int8Rows from(i64 at) const { return {stored_sd + at, scales_sg + at / kCacheGroup}; }
    __device__ void prefetch(int num_slots) const {
        prefetch_lines(stored_sd, num_slots * kHeadDim), prefetch_lines(scales_sg, num_slots * kGroups * 2);
    }
};

// Keys or values of one layer, [kv_heads][ctx] rows, to be read and written.
struct HalfCache {
    u16* stored;

    template <int kHeadDim>
    using Rows = HalfRows<kHeadDim>;

    template <int kHeadDim>
    __device__ HalfRows<kHeadDim> from(i64 at) const {
        return {stored + at};
    }

    // Entry `at`, by a warp that puts 32 neighbouring ones.
    __device__ void put(i64 at, float x) const { stored[at] = saturated_half(x); }

    // Copy a row from shared memory to entry `at` on, by a warp.
    template <int kHeadDim>
    __device__ void put(i64 at, const HalfRow<kHeadDim>& row) const {
#pragma unroll
        for (int first = 0; first < kHeadDim; first += kWarp) {
            const int d = first + this_thread() % kWarp;
            if (d < kHeadDim) stored[at + d] = row.stored[d];
        }
    }
};

struct Int8Cache {
    i8* stored;
    u16* scales;

    template <int kHeadDim>
    using Rows = Int8Rows<kHeadDim>;

    template <int kHeadDim>
    __device__ Int8Rows<kHeadDim> from(i64 at) const {
        return {stored + at, scales + at / kCacheGroup};
    }

    __device__ void put(i64 at, float x) const {
        u16 scale;
        stored[at] = quantize_entry(x, scale);
        if (at % kCacheGroup == 0) scales[at / kCacheGroup] = scale;
    }

    template <int kHeadDim>
    __device__ void put(i64 at, const Int8Row<kHeadDim>& row) const {
        const int lane = this_thread() % kWarp;
#pragma unroll
        for (int first = 0; first < kHeadDim; first += kWarp) stored[at + first + lane] = row.stored[first + lane];
        if (lane < kHeadDim / kCacheGroup) scales[at / kCacheGroup + lane] = row.scales[lane];
    }
};
