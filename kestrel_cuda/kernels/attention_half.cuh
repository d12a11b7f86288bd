// Attention over a float16 key-value cache on the tensor cores, or over an int8 one whose entries become float16 as they are
// loaded (kv_rows.cuh): what attention_few*.cu and attention_many*.cu share.
//
// The sums are fixed by cache position alone. The cache is cut into splits of 256 slots. For one query row and a split:
// scores are a chain of mma over the head's channels (query rounded to float16, float32 sums) times the scale, in units
// of log2; the split's maximum; weights are powers of two rounded to float16; weighted values and the sum of weights
// are a chain of mma over the 64 slots of a subtile, subtiles added in ascending order. Splits are merged in ascending
// order. A row of an mma does not depend on the others, and every kernel feeds it the same sums in the same order, 16 inputs
// at a time: mma.m16n8k16, or wgmma.m64nNk16 in attention_many_warpgroup.cu, which sums 16 to the same bits. So a query's
// result does not depend on how many queries came with it, as long as values are finite: a NaN among them also reaches
// the queries before it that share its tile.
//
// Which channel or slot stands where in an mma is free as long as both operands agree: lane j (of 4) takes channels
// 8j .. 8j + 7 of a run of 32, so a key is read 16 bytes at a time. Columns of value tiles do not meet, so that which
// channels they stand for is up to a kernel: in attention_held.cuh column c takes a few neighbouring
// ones, in token_boxes.cuh a tile is eight neighbouring ones.


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

    __device__ u32 word(int i) const { return words[i]; }
};

// What one lane puts into an mma as its rows: those of 16 queries by 16 channels, or by 16 slots.
struct Fragment {
    u32 words[4];
};

// Where a word of neighbouring columns 2 * pair and the next of a row lies in its fragments, one for each lane: `steps` of
// 16 columns before it.
__device__ inline int fragment_word(int step, int row, int pair) {
    return (step * kWarp + row % 8 * 4 + pair % 4) * 4 + pair / 4 * 2 + row / 8;
}

__device__ inline Fragment load_fragment(const u32* words, int step) {
    const uint4 v = *(const uint4*)(words + (step * kWarp + this_thread() % kWarp) * 4);
    return {{v.x, v.y, v.z, v.w}};
}

template <int kHeadDim>
struct Shape {
    static constexpr int kKeyHalves = kHeadDim >= 32 ? 8 : 4;            // channels a lane reads of a key at a time
    static constexpr int kKeyRuns = kHeadDim / (4 * kKeyHalves);
    static constexpr int kSteps = kHeadDim / 16;                         // mma steps of a score

    // Which half of a query's fragments a channel is: lane j of four takes kKeyHalves neighbouring ones of a run.
    __device__ static int query_half(int row, int d) {
        const int run = d / (4 * kKeyHalves), j = d / kKeyHalves % 4, e = d % kKeyHalves;
        const int step = run * (kKeyHalves / 4) + e / 4;
        return fragment_word(step, row, e / 2 % 2 * 4 + j) * 2 + e % 2;
    }
};

// The larger of a value and those of the other three lanes of its row.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
