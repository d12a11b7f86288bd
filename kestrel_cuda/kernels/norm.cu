// RMSNorm of the residual rows, plain or with the result quantized at once for the next linear.
// y = weight * (x * rsqrt(mean(x^2) + eps)); statistics in float32, summed in a fixed tree over 512 threads.

#include "common.cuh"

constexpr int kNormWarps = kNormThreads / kWarp;

__device__ inline float row_rstd(const float* x_k, int k, float eps) {
    __shared__ float scratch[kNormWarps];
    float sum = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < k; i += kNormThreads) sum = fma_rn(x_k[i], x_k[i], sum);
    sum = block_sum<kNormWarps>(sum, scratch);
    return __frsqrt_rn(add_rn(div_rn(sum, (float)k), eps));
}

// h_mk [m][k] -> codes_mk [m][k_padded], scales_mg [m][k_padded / 32]. Grid: m.
extern "C" __global__ void __launch_bounds__(kNormThreads)
rms_norm_quantize(const float* h_mk, const float* weight_k, i8* codes_mk, float* scales_mg, int k, int k_padded,
                  float eps) {
    const float* const x_k = h_mk + (i64)blockIdx.x * k;
    const float rstd = row_rstd(x_k, k, eps);
    const bool aligned = ((u64)x_k | (u64)weight_k) % sizeof(float4) == 0;
    const int of_warp = threadIdx.x / kWarp * kWarp * kLaneValues, lane = threadIdx.x % kWarp;
    for (int first = of_warp; first < k_padded; first += kNormThreads * kLaneValues) {
        const int i = first + lane * kLaneValues;
        float y[kLaneValues];
        if (aligned && i + kLaneValues <= k) {
            const float4 x = *(const float4*)(x_k + i), weight = *(const float4*)(weight_k + i);
            y[0] = mul_rn(weight.x, mul_rn(x.x, rstd)), y[1] = mul_rn(weight.y, mul_rn(x.y, rstd));
            y[2] = mul_rn(weight.z, mul_rn(x.z, rstd)), y[3] = mul_rn(weight.w, mul_rn(x.w, rstd));
        } else {
#pragma unroll
            for (int c = 0; c < kLaneValues; ++c)
                y[c] = i + c < k ? mul_rn(weight_k[i + c], mul_rn(x_k[i + c], rstd)) : 0.0f;
        }
        quantize_lane_values(y, codes_mk, scales_mg, (i64)blockIdx.x * k_padded + i, i < k_padded);
    }
}

// h_mk [m][k] -> y_mk [m][k] float32. Grid: m.
extern "C" __global__ void __launch_bounds__(kNormThreads)
rms_norm(const float* h_mk, const float* weight_k, float* y_mk, int k, float eps) {
    const float* const x_k = h_mk + (i64)blockIdx.x * k;
    const float rstd = row_rstd(x_k, k, eps);
    for (int i = threadIdx.x; i < k; i += kNormThreads)
        y_mk[(i64)blockIdx.x * k + i] = mul_rn(weight_k[i], mul_rn(x_k[i], rstd));
}
