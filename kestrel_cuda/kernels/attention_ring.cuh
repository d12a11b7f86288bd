// Subtiles of keys and values on their way to the warps of attention_many.cu and attention_many_q8.cu, through shared
// memory, as float16 entries.

constexpr int kTileRows = 64;
constexpr int kTileThreads = kTileRows / kMmaRows * kWarp;
constexpr int kStages = 3;
constexpr int kAhead = kStages - 1;    // subtiles on their way while one is used
constexpr int kChunk = 8;              // halves that keep together
constexpr int kPieceCodes = 16;        // codes a thread copies at a time

// Where a slot's channel lies in a subtile. Chunks of 16 bytes change places so that from 32 channels on neither the
// same chunk of eight slots (values) nor four chunks of two slots (keys) meet in a bank. Slots 8 apart turn alike.
template <int kHeadDim>
__device__ inline int place(int slot, int channel) {
    const int turn = (slot % 2 * 4 + slot / 2 % 4) % (kHeadDim / kChunk);
    return slot * kHeadDim + ((channel / kChunk) ^ turn) * kChunk + channel % kChunk;
}

// Where the channel `more` further lies: place(slot, channel + more) for a `more` that has no bit of channel.
__device__ inline int beside(int at, int more) { return (at ^ more % 64) + more / 64 * 64; }

// Subtiles in the order of their use: the keys of a split, then its values.
struct Walk {
    int slot = 0;
    bool is_value = false;

    __device__ void advance(int last) {
        slot += kSubtile;
        if (slot % kSplit == 0 || slot > last) {
            if (!is_value) slot = (slot - 1) / kSplit * kSplit;
            is_value = !is_value;
        }
    }
};

template <int kHeadDim>
struct HalfStages {
    u16 subtiles[kStages][kSubtile * kHeadDim];
};

// The subtiles of a kv head in the order of their use, up to the slot `last`; the block's threads share the work.
template <int kHeadDim>
struct HalfRing {
    using Stages = HalfStages<kHeadDim>;
    using Rows = HalfRows<kHeadDim>;
    Stages& stages;
    Rows k, v;
    int last;
    Walk fetched;
    int stage = kStages - 1;

    // Past the end an empty group keeps the count of those on their way.
    __device__ void fetch(int to_stage) {
        constexpr int kChunks = kHeadDim / kChunk, kSlots = kTileThreads / kChunks;
        const int own_slot = threadIdx.x / kChunks, own_channel = threadIdx.x % kChunks * kChunk;
        if (fetched.slot <= last) {
            const u16* from = (fetched.is_value ? v.stored_sd : k.stored_sd) + (i64)fetched.slot * kHeadDim + threadIdx.x * kChunk;
            u16* to = stages.subtiles[to_stage] + place<kHeadDim>(own_slot, own_channel);
            if (fetched.slot + kSubtile - 1 <= last) {
#pragma unroll
                for (int more = 0; more < kSubtile; more += kSlots)
                    copy_async_16(to + more * kHeadDim, from + more * kHeadDim, true);
            } else {
                // Slots past the last read as zero: their weights are 0, and 0 times a NaN would not be.
#pragma unroll 1
                for (int slot = own_slot; slot < kSubtile; slot += kSlots) {
                    const bool valid = fetched.slot + slot <= last;
                    copy_async_16(to, valid ? from : k.stored_sd, valid);
                    from += kSlots * kHeadDim, to += kSlots * kHeadDim;
                }
            }
            fetched.advance(last);
        }
        asm volatile("cp.async.commit_group;");
    }

    // The subtile to use now; the one used before makes room for the next fetch.
    __device__ const u16* next() {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
        __syncthreads();
        fetch(stage);
        stage = stage == kStages - 1 ? 0 : stage + 1;
        return stages.subtiles[stage];
    }
};

// Pieces of codes that one thread copies and turns into entries, [piece][thread], each with the word that has its scale.
template <int kHeadDim>
struct Int8Stages {
    static constexpr int kPieces = kSubtile * kHeadDim / kPieceCodes / kTileThreads;
    u16 subtiles[kAhead][kSubtile * kHeadDim];
    uint4 codes[kAhead][kPieces][kTileThreads];
    u32 scales[kAhead][kPieces][kTileThreads];
    Int8Rows<kHeadDim> k, v;           // not in registers, which scores take; written alike by all threads
};

// The thread's number, read anew: what is computed from it is not held in registers meanwhile.
__device__ inline u32 thread_anew() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// The same over an int8 cache. Codes and scales are on their way to the thread that asked for them and no other, so that
// only the subtiles of entries are shared: one is made while warps that are behind use the one before.
template <int kHeadDim>
struct Int8Ring {
    using Stages = Int8Stages<kHeadDim>;
    using Rows = Int8Rows<kHeadDim>;
    static constexpr int kPiecesOfRow = kHeadDim / kPieceCodes, kSlots = kTileThreads / kPiecesOfRow;

    Stages& stages;
    int last;
    Walk fetched, used;
    int stage = 0;

    __device__ Int8Ring(Stages& stages, const Rows& k, const Rows& v, int last) : stages(stages), last(last) {
        stages.k = k, stages.v = v;
    }

    __device__ static int own_slot(u32 thread) { return thread / kPiecesOfRow; }
    __device__ static int own_channel(u32 thread) { return thread % kPiecesOfRow * kPieceCodes; }

    // Of the thread's first channel in a subtile, among a head's.
    __device__ static i64 own(const Walk& walk, u32 thread) {
        return (i64)(walk.slot + own_slot(thread)) * kHeadDim + own_channel(thread);
    }

    // Past the end an empty group keeps the count of those on their way. Slots past the last read as zero, scales too.
    __device__ void fetch(int to_stage) {
        if (fetched.slot <= last) {
            const Rows rows = fetched.is_value ? stages.v : stages.k;
            const u32 thread = thread_anew();
            i64 at = own(fetched, thread);
#pragma unroll 1
            for (int piece = 0; piece < Stages::kPieces; ++piece) {
                const bool valid = at < (i64)(last + 1) * kHeadDim;
                // Whole words are copied; arrays end with one, so that nothing beyond them is read.
                const u64 word = (u64)(rows.scales_sg + at / kCacheGroup) & ~(u64)3;
                copy_async_16(&stages.codes[to_stage][piece][thread], valid ? rows.stored_sd + at : rows.stored_sd, valid);
                copy_async_4(&stages.scales[to_stage][piece][thread], valid ? (const void*)word : rows.stored_sd, valid);
                at += kSlots * kHeadDim;
            }
            fetched.advance(last);
        }
        asm volatile("cp.async.commit_group;");
    }

    // Which half of its word a piece's scale is.
    __device__ int scale_half(int piece, u32 thread) const {
        // An even number of groups puts a channel's scales in the same half for every slot.
        if constexpr (Rows::kGroups % 2 == 0) return own_channel(thread) / kCacheGroup % 2;
        const Rows rows = used.is_value ? stages.v : stages.k;
        return (u64)(rows.scales_sg + own(used, thread) / kCacheGroup + piece * kSlots * Rows::kGroups) / sizeof(u16) % 2;
    }

    __device__ void make_entries() const {
        const u32 thread = thread_anew();
        u16* to = stages.subtiles[stage];
        const int at = place<kHeadDim>(own_slot(thread), own_channel(thread));
        // Threads whose first chunks lie in the same banks begin with the other one.
        const int first = kHeadDim >= 64 ? thread / 4 % 2 : 0;
#pragma unroll 1
        for (int piece = 0; piece < Stages::kPieces; ++piece) {
            const u32 scale = twice(stages.scales[stage][piece][thread], scale_half(piece, thread));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int chunk = i ^ first;
                const uint2 codes = ((const uint2*)&stages.codes[stage][piece][thread])[chunk];
                *(uint4*)(to + beside(at, chunk * kChunk)) =
                    make_uint4(entry_pair(codes.x, 0, scale), entry_pair(codes.x, 1, scale),
                               entry_pair(codes.y, 0, scale), entry_pair(codes.y, 1, scale));
            }
            to += kSlots * kHeadDim;
        }
    }

    // The subtile to use now. Who made it has passed the barrier before, so nobody still uses the one it replaces.
    __device__ const u16* next() {
        asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1));
        make_entries();
        used.advance(last);
        __syncthreads();
        fetch(stage);
        const u16* made = stages.subtiles[stage];
        stage ^= 1;
        return made;
    }
};
