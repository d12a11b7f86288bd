// q/k RMSNorm over a head, rotary embedding, and the write of keys and values into the cache, in one step.
// The rotation table holds one row a cache slot, with multimodal positions already mixed in, so the kernel knows
// nothing of (t, h, w). Pairs are (i, i + head_dim / 2).

#include "common.cuh"
#include "kv_rows.cuh"

constexpr int kRopeWarps = 8;
constexpr int kMaxHeadDim = 256;

// Entries of float16 (kind 1) or float32 (kind 2), as they are.
struct PlainCache {
    void* entries;
    int kind;

    __device__ void put(i64 at, float x) const {
        if (kind == 1) ((u16*)entries)[at] = saturated_half(x);
        else ((float*)entries)[at] = x;
    }
};

// A warp puts a group of 32 channels at a time.
struct GroupedCache {
    i8* codes;
    u16* scales;

    __device__ void put(i64 at, float x) const {
        u16 scale;
        codes[at] = quantize_entry(x, scale);
        if (threadIdx.x % kWarp == 0) scales[at / kCacheGroup] = scale;
    }
};

// qkv [m][ld] with q, k, v from the given columns; cos_sd, sin_sd [ctx][head_dim / 2];
// q_mhd [m][heads][head_dim] float32; k, v [kv_heads][ctx][head_dim], with scales [kv_heads][ctx][head_dim / 32] where
// they are codes. Grid: (ceil((heads + 2 kv_heads) / 8), m), one warp a head.
template <typename Cache>
__device__ inline void norm_rope_store(const float* qkv, const float* q_norm_d, const float* k_norm_d, const float* cos_sd,
                                       const float* sin_sd, const int* position, float* q_mhd, const Cache& k, const Cache& v,
                                       int ld, int k_column, int v_column, int num_heads, int num_kv_heads, int head_dim,
                                       int ctx, float eps) {
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
            v.put(((i64)kv_head * ctx + slot) * head_dim + d, source[v_column + kv_head * head_dim + d]);
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
        else k.put(((i64)kv_head * ctx + slot) * head_dim + d, y);
    }
}

extern "C" __global__ void __launch_bounds__(kRopeWarps * kWarp)
qk_norm_rope_store(const float* qkv, const float* q_norm_d, const float* k_norm_d, const float* cos_sd,
                   const float* sin_sd, const int* position, float* q_mhd, void* k_hsd, void* v_hsd, int ld,
                   int k_column, int v_column, int num_heads, int num_kv_heads, int head_dim, int ctx, int kv_kind,
                   float eps) {
    const PlainCache k = {k_hsd, kv_kind}, v = {v_hsd, kv_kind};
    norm_rope_store(qkv, q_norm_d, k_norm_d, cos_sd, sin_sd, position, q_mhd, k, v, ld, k_column, v_column, num_heads,
                    num_kv_heads, head_dim, ctx, eps);
}

// head_dim divides by 32.
extern "C" __global__ void __launch_bounds__(kRopeWarps * kWarp)
qk_norm_rope_store_q8(const float* qkv, const float* q_norm_d, const float* k_norm_d, const float* cos_sd,
                      const float* sin_sd, const int* position, float* q_mhd, i8* k_hsd, u16* k_scales_hsg, i8* v_hsd,
                      u16* v_scales_hsg, int ld, int k_column, int v_column, int num_heads, int num_kv_heads,
                      int head_dim, int ctx, float eps) {
    const GroupedCache k = {k_hsd, k_scales_hsg}, v = {v_hsd, v_scales_hsg};
    norm_rope_store(qkv, q_norm_d, k_norm_d, cos_sd, sin_sd, position, q_mhd, k, v, ld, k_column, v_column, num_heads,
                    num_kv_heads, head_dim, ctx, eps);
}
