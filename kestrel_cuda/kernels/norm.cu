// RMSNorm of the residual rows, plain or with the result quantized at once for the next linear.
// y = weight * (x * rsqrt(mean(x^2) + eps)); statistics in float32, summed in a fixed tree over 512 threads.

#include "common.cuh"

constexpr int kNormWarps = kNormThreads / kWarp;

__device__ inline float row_rstd(const float* x_k, int k, float eps) {
    __shared__ float scratch[kNormWarps];
    float sum = 0.0f;
#pragma unroll 8
    for (int i = threadIdx.x; i < k; i += kNormThreads) sum = fma_rn(x_k[i], x_k[i], sum);
    sum = block_sum<kNormWarps>(sum, scratch);
    return __frsqrt_rn(add_rn(div_rn(sum, (float)k), eps));
}

constexpr int kKeptFours = 2;          // neighbouring values that a thread keeps of a row, where all of it is kept
constexpr int kKeptInputs = kKeptFours * kNormThreads * kLaneValues;

struct RowCodes {
    i8* codes_mk;
    float* scales_mg;
    int k_padded;

    // Those of a lane's values, from input i on, normed.
    __device__ void put(int i, const float (&x)[kLaneValues], const float (&weight)[kLaneValues], float rstd) const {
        float y[kLaneValues];
#pragma unroll
        for (int c = 0; c < kLaneValues; ++c) y[c] = mul_rn(weight[c], mul_rn(x[c], rstd));
        quantize_lane_values(y, codes_mk, scales_mg, (i64)blockIdx.x * k_padded + i, i < k_padded);
    }
};

// h_mk [m][k] -> codes_mk [m][k_padded], scales_mg [m][k_padded / 32]. Grid: m.
extern "C" __global__ void __launch_bounds__(kNormThreads, 4)
rms_norm_quantize(const float* h_mk, const float* weight_k, i8* codes_mk, float* scales_mg, int k, int k_padded,
                  float eps) {
    const float* const x_k = h_mk + (i64)blockIdx.x * k;
    const bool aligned = ((u64)x_k | (u64)weight_k) % sizeof(float4) == 0;
    const RowCodes out = {codes_mk, scales_mg, k_padded};
    constexpr int kStep = kNormThreads * kLaneValues;
    const int own = threadIdx.x * kLaneValues;
    if (k_padded > kKeptInputs) {
        const float rstd = row_rstd(x_k, k, eps);
        for (int i = own; i - own < k_padded; i += kStep) {
            float x[kLaneValues], weight[kLaneValues];
            load_lane_values(x, x_k, i, k, aligned), load_lane_values(weight, weight_k, i, k, aligned);
            out.put(i, x, weight, rstd);
        }
        return;
    }
    __shared__ __align__(16) float row_k[kKeptInputs];
    float x[kKeptFours][kLaneValues];
#pragma unroll
    for (int j = 0; j < kKeptFours; ++j) load_lane_values(x[j], x_k, own + j * kStep, k, aligned);
#pragma unroll
    for (int j = 0; j < kKeptFours; ++j)
        *(float4*)(row_k + own + j * kStep) = {x[j][0], x[j][1], x[j][2], x[j][3]};
    __syncthreads();
    const float rstd = row_rstd(row_k, k, eps);
#pragma unroll
    for (int j = 0; j < kKeptFours; ++j) {
        if (j * kStep >= k_padded) break;
        float weight[kLaneValues];
        load_lane_values(weight, weight_k, own + j * kStep, k, aligned);
        out.put(own + j * kStep, x[j], weight, rstd);
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
