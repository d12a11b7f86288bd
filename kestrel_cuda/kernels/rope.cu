// q/k RMSNorm over a head, rotary embedding, and the write of keys and values into the cache, in one step.
// The rotation table holds one row a cache slot, with multimodal positions already mixed in, so the kernel knows
// nothing of (t, h, w). Pairs are (i, i + head_dim / 2).

#include "common.cuh"

constexpr int kRopeWarps = 8;
constexpr int kMaxHeadDim = 256;

__device__ inline void store_kv(void* cache, i64 at, float x, int kv_kind) {
    // Saturate what a half cannot hold; a NaN passes, so that it reaches the logits.
    if (kv_kind == 1) ((u16*)cache)[at] = float_to_half(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x);
    else ((float*)cache)[at] = x;
}

// qkv [m][ld] with q, k, v from the given columns; cos_sd, sin_sd [ctx][head_dim / 2];
// q_mhd [m][heads][head_dim] float32; k_hsd, v_hsd [kv_heads][ctx][head_dim], kind 1 f16, 2 f32.
// Grid: (ceil((heads + 2 kv_heads) / 8), m), one warp a head.
extern "C" __global__ void __launch_bounds__(kRopeWarps * kWarp)
qk_norm_rope_store(const float* qkv, const float* q_norm_d, const float* k_norm_d, const float* cos_sd,
                   const float* sin_sd, const int* position, float* q_mhd, void* k_hsd, void* v_hsd, int ld,
                   int k_column, int v_column, int num_heads, int num_kv_heads, int head_dim, int ctx, int kv_kind,
                   float eps) {
    __shared__ float normed[kRopeWarps][kMaxHeadDim];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int head = blockIdx.x * kRopeWarps + warp;
    const int row = blockIdx.y;
    if (head >= num_heads + 2 * num_kv_heads) return;
    const int slot = *position + row;
    const float* source = qkv + (i64)row * ld;

    if (head >= num_heads + num_kv_heads) {
        const int kv_head = head - num_heads - num_kv_heads;
        for (int d = lane; d < head_dim; d += kWarp)
            store_kv(v_hsd, ((i64)kv_head * ctx + slot) * head_dim + d, source[v_column + kv_head * head_dim + d], kv_kind);
        return;
    }
    const bool is_query = head < num_heads;
    const int kv_head = head - num_heads;
    const float* x = source + (is_query ? head * head_dim : k_column + kv_head * head_dim);
    const float* weight = is_query ? q_norm_d : k_norm_d;
    float sum = 0.0f;
    for (int d = lane; d < head_dim; d += kWarp) sum = fma_rn(x[d], x[d], sum);
    const float rstd = __frsqrt_rn(add_rn(div_rn(warp_sum(sum), (float)head_dim), eps));
    for (int d = lane; d < head_dim; d += kWarp) normed[warp][d] = mul_rn(weight[d], mul_rn(x[d], rstd));
    __syncwarp();

    const int half = head_dim / 2;
    for (int d = lane; d < head_dim; d += kWarp) {
        const int pair = d < half ? d : d - half;
        const float c = cos_sd[(i64)slot * half + pair], s = sin_sd[(i64)slot * half + pair];
        const float other = d < half ? -normed[warp][d + half] : normed[warp][d - half];
        const float y = add_rn(mul_rn(normed[warp][d], c), mul_rn(other, s));
        if (is_query) q_mhd[((i64)row * num_heads + head) * head_dim + d] = y;
        else store_kv(k_hsd, ((i64)kv_head * ctx + slot) * head_dim + d, y, kv_kind);
    }
}
