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

// qkv_mn [m][ld] with q, k, v from the given columns; cos_sd, sin_sd [ctx][head_dim / 2]; q_mhd [m][heads][head_dim]
// float32; k, v [kv_heads][ctx][head_dim], with scales [kv_heads][ctx][head_dim / 32] where they are codes.
template <typename Cache>
struct Heads {
    const float *qkv_mn, *q_norm_d, *k_norm_d, *cos_sd, *sin_sd;
    const int* position;
    float* q_mhd;
    Cache k, v;
    int ld, k_column, v_column, num_heads, num_kv_heads, head_dim, ctx;
    float eps;

    // Grid: (ceil((heads + 2 kv_heads) / 8), m), one warp a head.
    __device__ void store() const {
        const int head = blockIdx.x * kRopeWarps + threadIdx.x / kWarp, row = blockIdx.y;
        if (head >= num_heads + 2 * num_kv_heads) return;
        if (head_dim == 128) store_in_registers<128>(head, row);
        else if (head_dim == 64) store_in_registers<64>(head, row);
        else store_by_shared_memory(head, row);
    }

    __device__ bool is_query(int head) const { return head < num_heads; }
    __device__ bool is_value(int head) const { return head >= num_heads + num_kv_heads; }

    __device__ const float* source(int head, int row) const {
        const int column = is_query(head)   ? head * head_dim
                           : is_value(head) ? v_column + (head - num_heads - num_kv_heads) * head_dim
                                            : k_column + (head - num_heads) * head_dim;
        return qkv_mn + (i64)row * ld + column;
    }

    __device__ i64 entry(int kv_head, int slot) const { return ((i64)kv_head * ctx + slot) * head_dim; }

    __device__ void put(int head, int row, int slot, int d, float y) const {
        if (is_query(head)) q_mhd[((i64)row * num_heads + head) * head_dim + d] = y;
        else k.put(entry(head - num_heads, slot) + d, y);
    }

    __device__ float rstd_of(float sum) const {
        return __frsqrt_rn(add_rn(div_rn(warp_sum(sum), (float)head_dim), eps));
    }

    // Both values of a pair are one lane's, and everything is asked for before the first is used.
    template <int kHeadDim>
    __device__ void store_in_registers(int head, int row) const {
        constexpr int kValues = kHeadDim / kWarp, kPairs = kValues / 2;
        const int lane = threadIdx.x % kWarp;
        const float* const x_d = source(head, row) + lane;
        float x[kValues];
#pragma unroll
        for (int i = 0; i < kValues; ++i) x[i] = x_d[i * kWarp];
        const int slot = *position + row;
        if (is_value(head)) {
            const i64 at = entry(head - num_heads - num_kv_heads, slot) + lane;
#pragma unroll
            for (int i = 0; i < kValues; ++i) v.put(at + i * kWarp, x[i]);
            return;
        }
        const float* const weight_d = (is_query(head) ? q_norm_d : k_norm_d) + lane;
        const i64 rotation = (i64)slot * (kHeadDim / 2) + lane;
        float weight[kValues], c[kPairs], s[kPairs];
#pragma unroll
        for (int i = 0; i < kValues; ++i) weight[i] = weight_d[i * kWarp];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) c[i] = cos_sd[rotation + i * kWarp], s[i] = sin_sd[rotation + i * kWarp];
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum = fma_rn(x[i], x[i], sum);
        const float rstd = rstd_of(sum);
#pragma unroll
        for (int i = 0; i < kValues; ++i) x[i] = mul_rn(weight[i], mul_rn(x[i], rstd));
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const float low = x[i], high = x[i + kPairs];
            const int d = lane + i * kWarp;
            put(head, row, slot, d, add_rn(mul_rn(low, c[i]), mul_rn(-high, s[i])));
            put(head, row, slot, d + kHeadDim / 2, add_rn(mul_rn(high, c[i]), mul_rn(low, s[i])));
        }
    }

    // Any head_dim.
    __device__ void store_by_shared_memory(int head, int row) const {
        __shared__ float normed[kRopeWarps][kMaxHeadDim];
        float* const normed_d = normed[threadIdx.x / kWarp];
        const int lane = threadIdx.x % kWarp, slot = *position + row, half = head_dim / 2;
        const float* const x_d = source(head, row);
        if (is_value(head)) {
            const i64 at = entry(head - num_heads - num_kv_heads, slot);
            for (int d = lane; d < head_dim; d += kWarp) v.put(at + d, x_d[d]);
            return;
        }
        const float* const weight_d = is_query(head) ? q_norm_d : k_norm_d;
        float sum = 0.0f;
        for (int d = lane; d < head_dim; d += kWarp) sum = fma_rn(x_d[d], x_d[d], sum);
        const float rstd = rstd_of(sum);
        for (int d = lane; d < head_dim; d += kWarp) normed_d[d] = mul_rn(weight_d[d], mul_rn(x_d[d], rstd));
        __syncwarp();
        for (int d = lane; d < head_dim; d += kWarp) {
            const int pair = d < half ? d : d - half;
            const float c = cos_sd[(i64)slot * half + pair], s = sin_sd[(i64)slot * half + pair];
            const float other = d < half ? -normed_d[d + half] : normed_d[d - half];
            put(head, row, slot, d, add_rn(mul_rn(normed_d[d], c), mul_rn(other, s)));
        }
    }
};

extern "C" __global__ void __launch_bounds__(kRopeWarps * kWarp)
qk_norm_rope_store(const float* qkv, const float* q_norm_d, const float* k_norm_d, const float* cos_sd,
                   const float* sin_sd, const int* position, float* q_mhd, void* k_hsd, void* v_hsd, int ld,
                   int k_column, int v_column, int num_heads, int num_kv_heads, int head_dim, int ctx, int kv_kind,
                   float eps) {
    const PlainCache k = {k_hsd, kv_kind}, v = {v_hsd, kv_kind};
    Heads<PlainCache>{qkv, q_norm_d, k_norm_d, cos_sd, sin_sd, position, q_mhd, k, v, ld, k_column, v_column, num_heads,
                      num_kv_heads, head_dim, ctx, eps}.store();
}

// head_dim divides by 32.
extern "C" __global__ void __launch_bounds__(kRopeWarps * kWarp)
qk_norm_rope_store_q8(const float* qkv, const float* q_norm_d, const float* k_norm_d, const float* cos_sd,
                      const float* sin_sd, const int* position, float* q_mhd, i8* k_hsd, u16* k_scales_hsg, i8* v_hsd,
                      u16* v_scales_hsg, int ld, int k_column, int v_column, int num_heads, int num_kv_heads,
                      int head_dim, int ctx, float eps) {
    const GroupedCache k = {k_hsd, k_scales_hsg}, v = {v_hsd, v_scales_hsg};
    Heads<GroupedCache>{qkv, q_norm_d, k_norm_d, cos_sd, sin_sd, position, q_mhd, k, v, ld, k_column, v_column, num_heads,
                        num_kv_heads, head_dim, ctx, eps}.store();
}
