// The sums of a linear: items by warps out of their rings, pieces added up in ascending order. gemv.cu's to the bit.
// Knows no stage's meaning.

// Activation codes of a block in shared memory.
struct Codes {
    u32 codes, scales;                 // shared addresses
};

// A lane's sum becomes its product added to the sum of the lane eight before it, if there is one.
__device__ inline void carry(float& sum, float term, float factor) {
    asm volatile(
        "{ .reg .pred has; .reg .f32 carried; shfl.sync.up.b32 carried|has, %0, 8, 0, 0xffffffff;"
        " @has fma.rn.ftz.f32 %0, %1, %2, carried; }"
        : "+f"(sum)
        : "f"(term), "f"(factor));
}

// Sums of an item for four columns, complete in lanes 24 on: each lane makes the exact dots and factors of its group,
// and the sums are carried on from the lanes of one group to those of the next.
template <typename Weights>
__device__ inline float4 sum_item(const Part<Weights>& part, const Codes& x, int piece) {
    const int lane = this_thread() % kWarp, group = piece * kGroupsPerPiece + lane / 8;
    uint4 low, high;
    load_shared(low, x.codes + group * kGroup), load_shared(high, x.codes + group * kGroup + 16);
    const u32 x_words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float x_scale;
    load_shared(x_scale, x.scales + group * 4);
    const uint2 pairs = part.scales;
    const u16 scales[4] = {(u16)pairs.x, (u16)(pairs.x >> 16), (u16)pairs.y, (u16)(pairs.y >> 16)};
    constexpr int kWords = Weights::kWordsPerGroup;
    float terms[4], factors[4], sums[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        u32 words[kWords];
#pragma unroll
        for (int r = 0; r < kWords; ++r)
            words[r] = c == 0 ? part.words[r].x : c == 1 ? part.words[r].y : c == 2 ? part.words[r].z : part.words[r].w;
        terms[c] = (float)Weights::dot(words, x_words);
        factors[c] = mul_rn(x_scale, half_to_float(scales[c]));
        sums[c] = fma_rn(terms[c], factors[c], 0.0f);
    }
#pragma unroll
    for (int g = 1; g < kGroupsPerPiece; ++g)
#pragma unroll
        for (int c = 0; c < 4; ++c) carry(sums[c], terms[c], factors[c]);
    return make_float4(sums[0], sums[1], sums[2], sums[3]);
}

// `count` piece sums of a column, `kStep` bytes apart in shared memory, added to what the totals are; `up` is that of
// its up column, of gate and up alone.
template <bool kGateUp, int kStep, int kAtOnce>
__device__ inline void add_pieces_at_once(u32 from, float& total, float& up) {
    float one[kAtOnce], two[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
        load_shared(one[i], from + i * kStep);
        if (kGateUp) load_shared(two[i], from + i * kStep + 2 * kColumns * 4);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
        total = add_rn(total, one[i]);
        if (kGateUp) up = add_rn(up, two[i]);
    }
}

template <bool kGateUp, int kStep = 4 * kColumns * 4>
__device__ inline void add_pieces(u32 from, int count, float& total, float& up) {
    constexpr int kAtOnce = 16;
#pragma unroll 1
    for (; count >= kAtOnce; count -= kAtOnce, from += kAtOnce * kStep)
        add_pieces_at_once<kGateUp, kStep, kAtOnce>(from, total, up);
#pragma unroll 1
    for (; count > 0; --count, from += kStep) add_pieces_at_once<kGateUp, kStep, 1>(from, total, up);
}

// The warps that add pieces up, a set each: of those that attention needs least of right after the joint projection.
__device__ inline int finisher() { return this_thread() / kWarp; }

// One warp's part in a stage: the sums of all pieces of this block's sets, its half of one first. What the stage's
// input does not decide is done while that is on its way, and what a set's last piece does not decide before that is
// there: an address from shared memory costs a stage as much as a sum.
template <typename Weights>
struct Summer {
    using Place = typename Ring<Weights>::Place;
    const Ring<Weights> ring;
    const Cut& cut;
    const u32 buffers;
    Place place;
    Part<Weights> part;                // the item that is summed next
    const int items_are_pairs, gate_up, row_bytes;
    int set, first, own;               // -1 for half of one; its first item and how many
    u32 buffer;                        // where its piece sums go

    // Piece sums of several sets at a time go to one of two in turn from `buffers` on, in shared memory, those of a
    // half behind.
    __device__ Summer(const Ring<Weights>& r, const Cut& c, Place p, u32 buffers)
        : ring(r), cut(c), buffers(buffers), place(p), items_are_pairs(c.items_are_pairs), gate_up(c.gate_up),
          row_bytes(c.width() * 4) {
        begin(cut.has_half() ? -1 : (int)blockIdx.x, 0, 0);
        const int warp = this_thread() / kWarp;
        if (warp < own) ring.take(part, first_box(), warp, own, gate_up);
        else part = {};
    }

    // A warp a set adds its pieces and gives each lane's total, and that of its up column if it has one, to what
    // `prepare(round, set, lane)` gave it before. The lower half of a set hands its totals on in `half_words`, as of
    // `epoch()`. Called once; `place` is then the next stage's.
    template <typename Epoch, typename Prepare>
    __device__ void sum(const Codes& x, u64* const& half_words, Epoch epoch, Prepare prepare) {
        const int warp = this_thread() / kWarp, lane = this_thread() % kWarp;
        // Where four columns of a piece's sums go, and whence a lane adds those of its column.
        const int column = lane % 8 * 4, to = (items_are_pairs ? column % kColumns : column) * 4;
        auto own_column = [&] { return lane % (items_are_pairs ? kColumns : kWarp) * 4; };
        auto half = [&] { return half_words + blockIdx.x / 2 * 2 * kWarp + lane; };
        int round = 0, which = 0, count = 0;
        bool is_taken = true;
        while (set < cut.num_whole()) {
            Place box = first_box();
            for (int i = warp; i < own; i += kWarps, box = ring.step(box, kWarps / kBoxItems)) {
                if (!is_taken) ring.take(part, box, i, own, gate_up);
                is_taken = false;
                const int item = first + i, piece = items_are_pairs ? 2 * item + column / kColumns : item >> gate_up;
                const float4 sum = sum_item<Weights>(part, x, piece);
                if (lane >= 24) store_shared(buffer + to + piece * row_bytes + (gate_up & item) * 2 * kColumns * 4, sum);
            }
            is_taken = false;
            place = ring.step(place, (own + kBoxItems - 1) / kBoxItems);
            if (set < 0) {
                if (!cut.is_upper()) {
                    if (warp == kWarps - 1) {
                        const u32 from = buffer + own_column(), of = epoch();
                        const int count = cut.half_pieces();
                        u64* const words = half();
                        sync_few();
                        float total = 0.0f, up = 0.0f;
                        add_pieces<true>(from, count, total, up);
                        publish(words, total, of), publish(words + kWarp, up, of);
                    } else {
                        sync_few();
                    }
                }
                begin(blockIdx.x, 0, 0);
                continue;
            }
            const int next = set + gridDim.x;
            if (++count < cut.sets_at_once && next < cut.num_whole()) {
                begin(next, which, count);
                continue;
            }
            const int which_set = finisher();
            if (which_set >= count) {
                sync_few();
            } else {
                const u32 from = whole(which) + which_set * set_bytes() + own_column();
                const int num_pieces = cut.num_pieces;
                const auto hand_on = prepare(round + which_set, next - (count - which_set) * (int)gridDim.x, lane);
                sync_few();
                float total = 0.0f, up = 0.0f;
                if (gate_up) add_pieces<true>(from, num_pieces, total, up);
                else if (items_are_pairs) add_pieces<false, kColumns * 4>(from, num_pieces, total, up);
                else add_pieces<false, 2 * kColumns * 4>(from, num_pieces, total, up);
                hand_on(total, up);
            }
            round += count, which ^= 1, count = 0;
            begin(next, which, count);
        }
        if (cut.has_half() && cut.is_upper() && warp == kWarps - 1) {
            Word lower[2];
            lower[0].load(half()), lower[1].load(half() + kWarp);
            const u32 wanted = epoch();
            const auto hand_on = prepare(round, cut.num_whole() + blockIdx.x / 2, lane);
            float total = __uint_as_float(lower[0].await(half(), wanted));
            float up = __uint_as_float(lower[1].await(half() + kWarp, wanted));
            const int lower_pieces = cut.half_pieces();
            const u32 from = whole(2) + own_column() + lower_pieces * row_bytes;
            add_pieces<true>(from, cut.num_pieces - lower_pieces, total, up);
            hand_on(total, up);
        }
    }

  private:
    __device__ int set_bytes() const { return cut.num_pieces * row_bytes; }
    __device__ u32 whole(int which) const { return buffers + which * cut.sets_at_once * set_bytes(); }

    __device__ void begin(int next, int which, int count) {
        const bool is_half = next < 0, is_upper = is_half && cut.is_upper();
        set = next;
        first = is_upper ? cut.half_items() : 0;
        own = !is_half ? cut.num_items : is_upper ? cut.num_items - cut.half_items() : cut.half_items();
        buffer = is_half ? whole(2) : whole(which) + count * set_bytes();
    }

    __device__ Place first_box() const { return ring.step(place, this_thread() / kWarp / kBoxItems); }
};
