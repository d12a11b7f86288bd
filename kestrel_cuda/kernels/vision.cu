// The vision tower's steps on single rows: LayerNorm, learned positions, rotation of queries and keys, pixels.
// Rows are patches, or tokens of several patches side by side; between the steps they are bfloat16 or float32.

#include "common.cuh"
#include "vision.cuh"

constexpr int kRowWarps = 8;
constexpr int kValueThreads = 256;
constexpr float kLayerNormEps = 1e-6f;

// y = (x - mean) / sqrt(variance + eps) * weight + bias. One warp a row. Grid: ceil(m / 8).
template <typename Value>
__device__ inline void layer_norm(const float* x_mk, const float* weight_k, const float* bias_k, Value* y_mk, int m,
                                  int k) {
    const int row = blockIdx.x * kRowWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (row >= m) return;
    const float* x = x_mk + (i64)row * k;
    Value* y = y_mk + (i64)row * k;
    float sum = 0.0f;
    for (int i = lane; i < k; i += kWarp) sum = add_rn(sum, x[i]);
    const float mean = div_rn(warp_sum(sum), (float)k);
    float squares = 0.0f;
    for (int i = lane; i < k; i += kWarp) {
        const float centred = sub_rn(x[i], mean);
        squares = fma_rn(centred, centred, squares);
    }
    const float variance = div_rn(warp_sum(squares), (float)k);
    const float rstd = div_rn(1.0f, __fsqrt_rn(add_rn(variance, kLayerNormEps)));
    for (int i = lane; i < k; i += kWarp)
        store_value(y, i, add_rn(mul_rn(mul_rn(sub_rn(x[i], mean), rstd), weight_k[i]), bias_k[i]));
}

#define LAYER_NORM(SUFFIX, VALUE)                                                                                    \
    extern "C" __global__ void __launch_bounds__(kRowWarps * kWarp)                                                  \
    layer_norm_##SUFFIX(const float* x_mk, const float* weight_k, const float* bias_k, VALUE* y_mk, int m, int k) {  \
        layer_norm(x_mk, weight_k, bias_k, y_mk, m, k);                                                              \
    }
LAYER_NORM(bf16, u16)
LAYER_NORM(f32, float)

// h_mn += the table of side x side entries, resampled. Patch m lies at places_m2[m % frame_rows], a row and a column,
// each between two entries of the table's side: taps_p2 and the share of the second. Grid: (m, ceil(n / 256)).
extern "C" __global__ void __launch_bounds__(kValueThreads)
add_patch_positions(float* h_mn, const float* table_pn, const int* places_m2, const int* row_taps_p2,
                    const float* row_shares_p, const int* column_taps_p2, const float* column_shares_p,
                    int frame_rows, int side, int n) {
    const int channel = blockIdx.y * kValueThreads + threadIdx.x;
    if (channel >= n) return;
    const int row = places_m2[2 * (blockIdx.x % frame_rows)], column = places_m2[2 * (blockIdx.x % frame_rows) + 1];
    const float down = row_shares_p[row], across = column_shares_p[column];
    const float up = sub_rn(1.0f, down), back = sub_rn(1.0f, across);
    const float* top = table_pn + (i64)row_taps_p2[2 * row] * side * n + channel;
    const float* bottom = table_pn + (i64)row_taps_p2[2 * row + 1] * side * n + channel;
    const int left = column_taps_p2[2 * column] * n, right = column_taps_p2[2 * column + 1] * n;
    float sum = mul_rn(top[left], mul_rn(up, back));
    sum = add_rn(sum, mul_rn(top[right], mul_rn(up, across)));
    sum = add_rn(sum, mul_rn(bottom[left], mul_rn(down, back)));
    sum = add_rn(sum, mul_rn(bottom[right], mul_rn(down, across)));
    float& h = h_mn[(i64)blockIdx.x * n + channel];
    h = add_rn(h, sum);
}

// Rotate queries and keys where they are: pairs (i, i + head_dim / 2) by the row's angle for the first quarter of the
// channels, by the column's for the second. A row of qkv has queries, keys and values of all heads, in this order;
// cos_pd, sin_pd have head_dim / 4 angles a place. Grid: (m, ceil(heads * head_dim / 256)).
template <typename Value>
__device__ inline void rotate_patches(Value* qkv_mn, const int* places_m2, const float* cos_pd, const float* sin_pd,
                                      int frame_rows, int num_heads, int head_dim) {
    const int pair = blockIdx.y * kValueThreads + threadIdx.x, half = head_dim / 2, quarter = head_dim / 4;
    if (pair >= 2 * num_heads * half) return;
    const int i = pair % half;
    const int place = places_m2[2 * (blockIdx.x % frame_rows) + i / quarter];
    const float c = cos_pd[(i64)place * quarter + i % quarter], s = sin_pd[(i64)place * quarter + i % quarter];
    Value* first = qkv_mn + (i64)blockIdx.x * 3 * num_heads * head_dim + pair / half * head_dim + i;
    const float x = load_value(first, 0), y = load_value(first, half);
    store_value(first, 0, sub_rn(mul_rn(x, c), mul_rn(y, s)));
    store_value(first, half, add_rn(mul_rn(y, c), mul_rn(x, s)));
}

#define ROTATE_PATCHES(SUFFIX, VALUE)                                                                                \
    extern "C" __global__ void __launch_bounds__(kValueThreads)                                                      \
    rotate_patches_##SUFFIX(VALUE* qkv_mn, const int* places_m2, const float* cos_pd, const float* sin_pd,           \
                            int frame_rows, int num_heads, int head_dim) {                                           \
        rotate_patches(qkv_mn, places_m2, cos_pd, sin_pd, frame_rows, num_heads, head_dim);                          \
    }
ROTATE_PATCHES(bf16, u16)
ROTATE_PATCHES(f32, float)

// Pixels of 8 bits as rows of k values. A channel has so many inputs of a row and so many codes: those of all frames of
// the patch, or of one that stands for all; values_cv says what each code is in each channel. Grid: (m, ceil(k / 256)).
template <typename Value>
__device__ inline void put_pixels(const u8* codes_mk, const float* values_cv, Value* x_mk, int k, int channel_inputs,
                                  int channel_codes) {
    const int at = blockIdx.y * kValueThreads + threadIdx.x;
    if (at >= k) return;
    const int channel = at / channel_inputs, i = at % channel_inputs % channel_codes;
    const i64 row_codes = (i64)(k / channel_inputs) * channel_codes;
    const u8 code = codes_mk[blockIdx.x * row_codes + channel * channel_codes + i];
    store_value(x_mk, (i64)blockIdx.x * k + at, values_cv[channel * 256 + code]);
}

#define PUT_PIXELS(SUFFIX, VALUE)                                                                                    \
    extern "C" __global__ void __launch_bounds__(kValueThreads)                                                      \
    put_pixels_##SUFFIX(const u8* codes_mk, const float* values_cv, VALUE* x_mk, int k, int channel_inputs,          \
                        int channel_codes) {                                                                         \
        put_pixels(codes_mk, values_cv, x_mk, k, channel_inputs, channel_codes);                                     \
    }
PUT_PIXELS(bf16, u16)
PUT_PIXELS(f32, float)
