// Attention over a float16 key-value cache on the tensor cores, or over an int8 one whose entries become float16 as they are
// loaded (kv_rows.cuh): what attention_few*.cu and attention_many*.cu share.
//
// The sums are fixed by cache position alone. The cache is cut into splits of 256 slots. For one query row and a split:
// scores are a chain of mma over the head's channels (query rounded to float16, float32 sums) times the scale, in units
// of log2; the split's maximum; weights are powers of two rounded to float16; weighted values and the sum of weights
// are a chain of mma over the 64 slots of a subtile, subtiles added in ascending order. Splits are merged in ascending
// order. A row of an mma does not depend on the others, and every kernel below feeds the same instructions in the same
// order, so a query's result does not depend on how many queries came with it.
//
// Which channel or slot stands where in an mma is free as long as both operands agree: lane j (of 4) takes channels
// 8j .. 8j + 7 of a run of 32, so a key is read 16 bytes at a time. Columns of value tiles do not meet, so that which
// channels they stand for is up to a kernel: in attention_few.cuh column c takes HeadDim / 16 neighbouring ones.


constexpr int kMmaRows = 16;
constexpr u32 kHalfOnes = 0x3c003c00u;

__device__ inline void mma_m16n8k16(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline u32 pack_halves(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// The lower (which = 0) or upper halves of two words, side by side.
__device__ inline u32 pair_halves(u32 a, u32 b, int which) { return __byte_perm(a, b, which ? 0x7632 : 0x5410); }

// A run of halves as words: 16, 8, 4 or 2 bytes.
template <int kHalves>
struct Run {
    static constexpr int kWords = kHalves < 2 ? 1 : kHalves / 2;
    u32 words[kWords];

    __device__ void load(const u16* from) {
        if constexpr (kHalves == 8) {
            const uint4 v = *(const uint4*)from;
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        } else if constexpr (kHalves == 4) {
            const uint2 v = *(const uint2*)from;
            words[0] = v.x, words[1] = v.y;
        } else if constexpr (kHalves == 2) {
            words[0] = *(const u32*)from;
        } else {
            words[0] = *from;
        }
    }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = 0;
    }
};

template <int kHeadDim>
struct Shape {
    static constexpr int kKeyHalves = kHeadDim >= 32 ? 8 : 4;            // channels a lane reads of a key at a time
    static constexpr int kKeyRuns = kHeadDim / (4 * kKeyHalves);
    static constexpr int kSteps = kHeadDim / 16;                         // mma steps of a score
    static constexpr int kQueryStride = kHeadDim + 8;                    // halves
};

// Add the weighted values of 16 slots for 8 * kHalves channels, and the weights themselves to `sums`. `values` are this
// lane's channels of slots 2j, 2j + 1, 2j + 8, 2j + 9; weights the fragment of 16 rows by 16 slots.
template <int kHalves>
__device__ inline void add_values(float (&out)[kHalves][4], float (&sums)[4], const u32 (&weights)[4],
                                  const Run<kHalves> (&values)[4]) {
#pragma unroll
    for (int t = 0; t < kHalves; ++t)
        mma_m16n8k16(out[t], weights, pair_halves(values[0].words[t / 2], values[1].words[t / 2], t % 2),
                     pair_halves(values[2].words[t / 2], values[3].words[t / 2], t % 2));
    mma_m16n8k16(sums, weights, kHalfOnes, kHalfOnes);
}

constexpr int kWeightStride = kSplit + 8;      // halves

__device__ inline void load_weights(u32 (&weights)[4], const u16* rows, int slot) {
    const int quad = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
    const u16* top = rows + quad * kWeightStride + slot + 2 * j;
    const u16* bottom = top + 8 * kWeightStride;
    weights[0] = *(const u32*)top, weights[1] = *(const u32*)bottom;
    weights[2] = *(const u32*)(top + 8), weights[3] = *(const u32*)(bottom + 8);
}

// The larger of a value and those of the other three lanes of its row.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
