// What the kernels of the vision tower share: rows of bfloat16 or of float32, and the mma of the former.
//
// bfloat16 has the range of float32, so nothing in the tower overflows that would not in float32; sums are float32.

__device__ inline u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ inline u16 float_to_bf16(float x) { return (u16)pack_bf16(x, 0.0f); }

__device__ inline float load_value(const float* row, i64 at) { return row[at]; }
__device__ inline float load_value(const u16* row, i64 at) { return bf16_to_float(row[at]); }
__device__ inline void store_value(float* row, i64 at, float x) { row[at] = x; }
__device__ inline void store_value(u16* row, i64 at, float x) { row[at] = float_to_bf16(x); }

// What follows a linear; backends/vision.py has the numbers.
enum After { kNothing = 0, kGeluTanh = 1, kGeluErf = 2, kAdd = 3 };

__device__ inline float gelu_tanh(float x) {
    const float inner = mul_rn(add_rn(x, mul_rn(mul_rn(mul_rn(x, x), x), 0.044715f)), 0.79788456f);
    return mul_rn(mul_rn(x, add_rn(tanhf(inner), 1.0f)), 0.5f);
}

__device__ inline float gelu_erf(float x) {
    return mul_rn(mul_rn(x, add_rn(erff(mul_rn(x, 0.70710678f)), 1.0f)), 0.5f);
}

__device__ inline float finish(float x, int after) {
    if (after == kGeluTanh) return gelu_tanh(x);
    if (after == kGeluErf) return gelu_erf(x);
    return x;
}

// Start a copy of 16 bytes; one that is not valid reads nothing and writes zeros.
__device__ inline void copy_async_16(u32 to, const u16* from, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

// Four 8 x 8 tiles of 16-bit values; lane l points to row l % 8 of tile l / 8.
__device__ inline void load_tiles(u32 (&tiles)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(row));
}

__device__ inline void load_tiles_transposed(u32 (&tiles)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(row));
}

// c += a b: 16 rows of a by 8 columns of b over 16 inputs.
__device__ inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with c = 0 before.
__device__ inline void mma_bf16_first(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
