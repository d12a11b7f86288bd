// Weights to grouped codes and scales, bit for bit as quant/grouped.py; activations to int8 groups of 32.

#include "common.cuh"

// Weight arithmetic keeps subnormals (the compiler's -ftz does not reach these), so that a code never depends on
// whether a device flushed a tiny weight.
__device__ inline float mul_keep(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ inline float div_keep(float a, float b) {
    float r;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ inline float load_weight(const void* source, i64 i, int source_kind) {
    if (source_kind == 0) return bf16_to_float(((const u16*)source)[i]);
    if (source_kind == 1) return half_to_float(((const u16*)source)[i]);
    return ((const float*)source)[i];
}

// source [n][k] of kind 0 bf16, 1 f16, 2 f32 -> codes_nk [n][k_padded], scales_ng [n][k_padded / group_size].
// flags[0] counts groups holding a weight that is not finite, flags[1] scales over 65504, flags[2] groups with a
// weight that is not zero whose stored scale is zero.
// Grid: one warp a group, 8 warps a block. group_size 32 or 256: one or eight weights a lane.
extern "C" __global__ void __launch_bounds__(256)
quantize_weight(const void* source, i8* codes_nk, float* scales_ng, u32* flags, int source_kind, int n, int k,
                int k_padded, int group_size, int bits) {
    const int num_groups = k_padded / group_size;
    const i64 group = (i64)blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (group >= (i64)n * num_groups) return;
    const int row = (int)(group / num_groups);
    const int first = (int)(group % num_groups) * group_size;
    const int lane = threadIdx.x % kWarp;
    const int per_lane = group_size / kWarp;

    float w[8];
    u32 amax_bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int kk = first + i * kWarp + lane;
        w[i] = i < per_lane && kk < k ? load_weight(source, (i64)row * k + kk, source_kind) : 0.0f;
        amax_bits = max(amax_bits, __float_as_uint(w[i]) & 0x7fffffffu);
    }
    amax_bits = __reduce_max_sync(0xffffffffu, amax_bits);
    if (amax_bits >= kInfinityBits) {
        if (lane == 0) atomicAdd(&flags[0], 1u);
        return;
    }

    float d;
    if (bits == 8) {
        d = div_keep(__uint_as_float(amax_bits), 127.0f);
    } else {
        // The first element of largest magnitude gives the scale its sign; int4 groups have one weight a lane.
        const u32 at = __ballot_sync(0xffffffffu, (__float_as_uint(w[0]) & 0x7fffffffu) == amax_bits);
        d = div_keep(__shfl_sync(0xffffffffu, w[0], __ffs(at) - 1), -8.0f);
    }
    if ((__float_as_uint(d) & 0x7fffffffu) < 0x00800000u) d = 0.0f;
    if (fabsf(d) > 65504.0f && lane == 0) atomicAdd(&flags[1], 1u);
    const u16 stored = float_to_half(d);
    if (lane == 0) {
        scales_ng[group] = half_to_float(stored);
        if (amax_bits != 0 && (stored & 0x7fffu) == 0) atomicAdd(&flags[2], 1u);
    }

    const float inverse = d == 0.0f ? 0.0f : div_keep(1.0f, d);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i >= per_lane) break;
        int code = 0;
        if (d != 0.0f && bits == 8) {
            const float x = mul_keep(w[i], inverse);
            const float whole = truncf(x);
            const float rounded = fabsf(sub_rn(x, whole)) >= 0.5f ? add_rn(whole, copysignf(1.0f, x)) : whole;
            code = (int)fminf(fmaxf(rounded, -127.0f), 127.0f);
        } else if (d != 0.0f) {
            code = (int)fminf(fmaxf(floorf(add_rn(div_keep(w[i], d), 8.5f)), 0.0f), 15.0f) - 8;
        }
        codes_nk[(i64)row * k_padded + first + i * kWarp + lane] = (i8)code;
    }
}

// Adds to flags[0] how many of num_values source values (kind as above) are not finite. Grid: any.
extern "C" __global__ void __launch_bounds__(256)
count_nonfinite(const void* source, u32* flags, int source_kind, i64 num_values) {
    u32 count = 0;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < num_values; i += (i64)gridDim.x * blockDim.x)
        count += (__float_as_uint(load_weight(source, i, source_kind)) & 0x7fffffffu) >= kInfinityBits;
    count = __reduce_add_sync(0xffffffffu, count);
    if (count != 0 && threadIdx.x % kWarp == 0) atomicAdd(&flags[0], count);
}

// x_mk [m][k] float32 -> codes_mk [m][k_padded] int8, scales_mg [m][k_padded / 32]. Grid: (ceil(k_padded / 2048), m).
extern "C" __global__ void __launch_bounds__(kQuantizeThreads)
quantize_rows(const float* x_mk, i8* codes_mk, float* scales_mg, int k, int k_padded) {
    const float* const x_k = x_mk + (i64)blockIdx.y * k;
    const bool aligned = (u64)x_k % sizeof(float4) == 0;
    const int own = blockIdx.x * kQuantizedInputs + threadIdx.x * kLaneValues;
    float x[kFoursPerThread][kLaneValues];
#pragma unroll
    for (int j = 0; j < kFoursPerThread; ++j) load_lane_values(x[j], x_k, own + j * kFoursApart, k, aligned);
#pragma unroll
    for (int j = 0; j < kFoursPerThread; ++j) {
        const int i = own + j * kFoursApart;
        quantize_lane_values(x[j], codes_mk, scales_mg, (i64)blockIdx.y * k_padded + i, i < k_padded);
    }
}
