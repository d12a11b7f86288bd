// RMSNorm of the residual rows, plain or with the result quantized at once for the next linear.
// y = weight * (x * rsqrt(mean(x^2) + eps)); statistics in float32, summed in a fixed tree over 512 threads.

#include "common.cuh"

constexpr int kNormWarps = kNormThreads / kWarp;

__device__ inline float row_rstd(const float* x_k, int k, float eps) {
    __shared__ float scratch[kNormWarps];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < k; i += kNormThreads) sum = fma_rn(x_k[i], x_k[i], sum);
    sum = block_sum<kNormWarps>(sum, scratch);
    return __frsqrt_rn(add_rn(div_rn(sum, (float)k), eps));
}

// h_mk [m][k] -> codes_mk [m][k_padded], scales_mg [m][k_padded / 32]. Grid: m.
extern "C" __global__ void __launch_bounds__(kNormThreads)
rms_norm_quantize(const float* h_mk, const float* weight_k, i8* codes_mk, float* scales_mg, int k, int k_padded,
                  float eps) {
    const float* x = h_mk + (i64)blockIdx.x * k;
    const float rstd = row_rstd(x, k, eps);
    const int num_groups = k_padded / kGroup;
    for (int group = threadIdx.x / kWarp; group < num_groups; group += kNormWarps) {
        const int i = group * kGroup + threadIdx.x % kWarp;
        const float y = i < k ? mul_rn(weight_k[i], mul_rn(x[i], rstd)) : 0.0f;
        quantize_group(y, codes_mk + (i64)blockIdx.x * k_padded + group * kGroup,
                       scales_mg + (i64)blockIdx.x * num_groups + group);
    }
}

// h_mk [m][k] -> y_mk [m][k] float32. Grid: m.
extern "C" __global__ void __launch_bounds__(kNormThreads)
rms_norm(const float* h_mk, const float* weight_k, float* y_mk, int k, float eps) {
    const float* x = h_mk + (i64)blockIdx.x * k;
    const float rstd = row_rstd(x, k, eps);
    for (int i = threadIdx.x; i < k; i += kNormThreads)
        y_mk[(i64)blockIdx.x * k + i] = mul_rn(weight_k[i], mul_rn(x[i], rstd));
}
