// What a token's blocks are told and share: the model, the words and counters in device memory, how shared memory is
// laid out. Knows no stage's sums.

enum Counter { kLeft, kEpoch, kNumCounters };
constexpr int kCounterStride = 32;     // words between counters: one to a cache line

// What a kernel attends to: a context of one split, of which a block has a slice, or of any number of them, which are
// merged behind it; copied into shared memory ahead, or read into registers while the row is on its way.
enum class Context { kOneSplit, kHeld, kBoxed };

// A layer's stages: its linears, attention behind the first and, in a stage of its own so that neither holds registers
// for the other, what merges its splits. Of one split attention is no stage of its own, but goes with the first.
template <Context kContext>
struct Stages {
    static constexpr bool kMerges = kContext != Context::kOneSplit;
    static constexpr int kAttention = kMerges ? 1 : -1, kMerge = kMerges ? 2 : -1, kLayer = kMerges ? 6 : 4;

    __device__ static int kind(int step) { return kMerges && step > kAttention ? step - 2 : step; }
};

// Addresses of one layer beside its matrices, in the order the host writes them.
enum LayerPointer { kInputNorm, kPostNorm, kQNorm, kKNorm, kKeys, kValues, kLayerPointers };

// Everything a token needs; host and kernel share the order through the kernel's parameters.
struct Token {
    const u8* copy_maps;               // [4 * layers + 1][codes, scales], [layers][kKvMaps] maps of 128 bytes
    const u32* copy_order;             // [blocks][order_stride], as Ring's `copy_all` reads it
    const u64* pointers;               // [layers][kLayerPointers]
    const int* cuts;                   // [kNumKinds] Cut
    const float* final_norm_k;
    const void* table;                 // of embeddings; the row of this token begins at `first_entry`
    int table_kind;
    i64 first_entry;
    u64 *h_words, *qkv_words;          // flagged
    WideWord *attended_words, *product_words;      // flagged codes: [groups][3]
    u64* half_words;                   // flagged: [num_halved][gate, up][columns]
    u64* split_words;                  // flagged, as FlaggedSplits has them
    float* logits_v;
    u32* counters;
    int num_layers, num_slots, num_kv_slots, most_on_their_way, order_stride, hidden, num_kv_heads, num_splits;
    RowAttention<HalfCache> attention; // of no layer yet

    // The first map of a layer's keys and values.
    __device__ int kv_map(int layer) const { return 2 * (4 * num_layers + 1) + kKvMaps * layer; }
    __device__ float embedded(int i) const { return table_entry(table, table_kind, first_entry + i); }
};

// Dynamic shared memory in bytes from its start, behind the rings; `work` is what one stage at a time needs, attention
// or linear.
struct Room {
    int cuts, pointers, own_h, queries, work;
};

__device__ inline u32 load_acquire(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
