// Types, conversions and reductions that every kernel shares. Needs no header of the toolkit.
//
// All float arithmetic whose result reaches a logit goes through the _rn functions below or fmaf, so no compiler
// decides where a product and a sum are contracted: the same inputs give the same bits in every kernel.

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr int kWarp = 32;
constexpr int kGroup = 32;             // inputs per activation scale, and per exact integer dot product
constexpr int kPiece = 128;            // inputs per partial sum of a linear; pieces are added in ascending order
constexpr int kGroupsPerPiece = kPiece / kGroup;
constexpr int kNormThreads = 512;      // threads that share the sum of squares of a row
constexpr float kSmallestScale = 1.17549435e-38f;
constexpr u32 kInfinityBits = 0x7f800000u;

__device__ inline float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float sub_rn(float a, float b) { return __fsub_rn(a, b); }
__device__ inline float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float div_rn(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline float rcp_rn(float a) { return __frcp_rn(a); }
__device__ inline float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }

__device__ inline float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ inline u16 float_to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

__device__ inline float bf16_to_float(u16 b) { return __uint_as_float((u32)b << 16); }

// Entry `at` of a table of kind 0 bf16, 1 f16, 2 f32.
__device__ inline float table_entry(const void* table, int kind, i64 at) {
    if (kind == 0) return bf16_to_float(((const u16*)table)[at]);
    if (kind == 1) return half_to_float(((const u16*)table)[at]);
    return ((const float*)table)[at];
}

// Sum over the 32 lanes; every lane gets the same bits (a butterfly adds the same pairs on both sides).
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) x = add_rn(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// This thread, asked for anew: what depends on it is computed where it stands. Otherwise a compiler computes it ahead of the
// loop around it and keeps it in registers, or in memory where there are none left.
__device__ inline int this_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    __builtin_assume(thread >= 0 && thread < 1024);
    return thread;
}

// Shared memory by its own addresses: sums of them with constants cost nothing.
__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Start a copy of 16 or 4 bytes into shared memory; one that is not valid writes zeros.
__device__ inline void copy_async_16(void* shared, const void* global, bool valid) {
    const u32 at = (u32)__cvta_generic_to_shared(shared);
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(global), "r"(bytes));
}

__device__ inline void copy_async_4(void* shared, const void* global, bool valid) {
    const u32 at = (u32)__cvta_generic_to_shared(shared);
    const int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(global), "r"(bytes));
}

struct Int8Weights {
    static constexpr int kWordsPerGroup = 8;
    // Exact dot of one group; w are the group's words of a column, x the row's eight code words.
    __device__ static int dot(const u32* w, const u32* x) {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = __dp4a((int)w[i], (int)x[i], sum);
        return sum;
    }
};

struct Int4Weights {
    static constexpr int kWordsPerGroup = 4;
    // A nibble moved to the top of its byte is sixteen times its code, so the sum is an exact multiple of 16.
    __device__ static int dot(const u32* w, const u32* x) {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum = __dp4a((int)((w[i] << 4) & 0xf0f0f0f0u), (int)x[2 * i], sum);
            sum = __dp4a((int)(w[i] & 0xf0f0f0f0u), (int)x[2 * i + 1], sum);
        }
        return sum >> 4;
    }
};

__device__ inline float silu_mul(float gate, float up) {
    return mul_rn(div_rn(gate, add_rn(1.0f, expf(-gate))), up);
}

// Sum over a block of kWarps warps in a fixed tree; every thread gets it. `scratch` holds kWarps floats.
template <int kWarps>
__device__ inline float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total = add_rn(total, scratch[w]);
    __syncthreads();
    return total;
}

// Programmatic dependent launch: let the next kernel of a chain start its prologue, and wait until every kernel before
// this one is done and its writes are seen. Before the wait a kernel may read only what no kernel of the chain writes.
// Both are nothing where the architecture has no such launch, or where a kernel was launched plainly.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// An activation group of 32: s = amax / 127, code = rint(x * (1 / s)). A NaN or an infinity ends up in the scale, so it
// reaches the logits instead of becoming a plausible code.
__device__ inline float group_scale(u32 amax_bits) {
    const float scale = div_rn(__uint_as_float(amax_bits), 127.0f);
    return scale < kSmallestScale ? 0.0f : scale;
}

// What the values of a group are multiplied with to be codes; all are 0 where the scale is.
__device__ inline float codes_per_unit(float scale) { return scale != 0.0f ? rcp_rn(scale) : 0.0f; }

__device__ inline int code_of(float x, float per_unit) { return max(-127, min(127, __float2int_rn(mul_rn(x, per_unit)))); }

// The code of this lane's value in a group that has one a lane.
__device__ inline int quantize_in_group(float x, float& scale) {
    scale = group_scale(__reduce_max_sync(0xffffffffu, __float_as_uint(x) & 0x7fffffffu));
    return code_of(x, codes_per_unit(scale));
}

__device__ inline void quantize_group(float x, i8* codes, float* scale) {
    float s;
    codes[threadIdx.x % kWarp] = (i8)quantize_in_group(x, s);
    if (threadIdx.x % kWarp == 0) *scale = s;
}

// Of a group eight lanes may have four values each, so that a warp has several loads on their way.
constexpr int kLaneValues = 4;
constexpr int kGroupLanes = kGroup / kLaneValues;

// Those from input i of a row on; zeros past its end. `aligned`: the row begins at a multiple of 16 bytes.
__device__ inline void load_lane_values(float (&x)[kLaneValues], const float* x_k, int i, int k, bool aligned) {
    if (aligned && i + kLaneValues <= k) {
        const float4 four = *(const float4*)(x_k + i);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
        for (int c = 0; c < kLaneValues; ++c) x[c] = i + c < k ? x_k[i + c] : 0.0f;
    }
}

// Quantize them; the first of the lane's is value `at` of all. Lanes of one group are valid or not together.
__device__ inline void quantize_lane_values(const float (&x)[kLaneValues], i8* codes, float* scales, i64 at,
                                            bool valid) {
    u32 amax_bits = 0;
#pragma unroll
    for (int c = 0; c < kLaneValues; ++c) amax_bits = max(amax_bits, __float_as_uint(x[c]) & 0x7fffffffu);
#pragma unroll
    for (int step = kGroupLanes / 2; step > 0; step /= 2)
        amax_bits = max(amax_bits, __shfl_xor_sync(0xffffffffu, amax_bits, step));
    if (!valid) return;
    const float scale = group_scale(amax_bits);
    const float per_unit = codes_per_unit(scale);
    u32 four = 0;
#pragma unroll
    for (int c = 0; c < kLaneValues; ++c) four |= (u32)(u8)code_of(x[c], per_unit) << 8 * c;
    *(u32*)(codes + at) = four;
    if (threadIdx.x % kGroupLanes == 0) scales[at / kGroup] = scale;
}

// A block that quantizes rows, of which a thread has a four of values in each half.
constexpr int kQuantizeThreads = 256;
constexpr int kFoursPerThread = 2;
constexpr int kFoursApart = kQuantizeThreads * kLaneValues;
constexpr int kQuantizedInputs = kFoursPerThread * kFoursApart;

// Attention: the cut of the cache that fixes every sum by cache position, and how parts are merged.
constexpr int kSplit = 256;            // slots whose scores share a maximum
constexpr int kSubtile = 64;           // slots whose weighted values are one chain of sums
constexpr int kSubtiles = kSplit / kSubtile;
constexpr int kAttentionThreads = 256;
constexpr int kAttentionWarps = kAttentionThreads / kWarp;

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// How a running result and a split's result are weighted when merged: both relative to the larger maximum.
__device__ inline void merge_weights(float running_max, float split_max, float& keep, float& take, float& merged_max) {
    merged_max = fmaxf(running_max, split_max);
    keep = running_max == minus_infinity() ? 0.0f : exp2_fast(sub_rn(running_max, merged_max));
    take = split_max == minus_infinity() ? 0.0f : exp2_fast(sub_rn(split_max, merged_max));
}

__device__ inline float merge(float running, float keep, float split, float take) {
    return add_rn(mul_rn(running, keep), mul_rn(split, take));
}
