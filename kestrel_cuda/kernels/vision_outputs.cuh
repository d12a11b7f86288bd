// What the tensor cores' linears of the vision tower do with sums: bias, what follows, and stores of neighbours.

constexpr int kOutValues = 8;                  // of a lane at a time

// Neighbouring float outputs of a row as they were, to be added to; zeros where nothing is.
struct Before {
    float4 y[kOutValues / 4];

    __device__ void load(const void* out, i64 at, bool valid) {
#pragma unroll
        for (int i = 0; i < kOutValues / 4; ++i)
            y[i] = valid ? ((const float4*)((const float*)out + at))[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
};

// `before` is read only where something is added to it.
__device__ inline void store_outputs(void* out, i64 at, const float* sums, const float (&bias)[kOutValues],
                                     const Before& before, int after, int out_is_float) {
    float y[kOutValues];
#pragma unroll
    for (int i = 0; i < kOutValues; ++i) y[i] = finish(add_rn(sums[i], bias[i]), after);
    if (!out_is_float) {
        *(uint4*)((u16*)out + at) =
            make_uint4(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]), pack_bf16(y[6], y[7]));
        return;
    }
    float4* to = (float4*)((float*)out + at);
#pragma unroll
    for (int i = 0; i < kOutValues / 4; ++i) {
        float4 sum = make_float4(y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
        if (after == kAdd)
            sum = make_float4(add_rn(before.y[i].x, sum.x), add_rn(before.y[i].y, sum.y),
                              add_rn(before.y[i].z, sum.z), add_rn(before.y[i].w, sum.w));
        to[i] = sum;
    }
}
