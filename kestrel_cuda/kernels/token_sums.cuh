// The sums of a linear: items by warps out of their rings, pieces added up in ascending order. gemv.cu's to the bit. Knows
// no stage's meaning.

// Activation codes of a block in shared memory.
struct Codes {
    u32 codes, scales;                 // shared addresses
};

// Sums of an item for four columns, complete in lanes 24 on: each lane makes the exact dots and factors of its group, and
// the sums are carried on from the lanes of one group to those of the next.
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
        for (int c = 0; c < 4; ++c) {
            const float carried = __shfl_up_sync(0xffffffffu, sums[c], 8);
            if (lane / 8 == g) sums[c] = fma_rn(terms[c], factors[c], carried);
        }
    return make_float4(sums[0], sums[1], sums[2], sums[3]);
}

// `count` piece sums of a column, `step` bytes apart in shared memory, added to what the totals are; `up` is that of its up
// column, of gate and up alone.
template <bool kGateUp, int kAtOnce>
__device__ inline void add_pieces_at_once(u32& from, int step, float& total, float& up) {
    float one[kAtOnce], two[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, from += step) {
        load_shared(one[i], from);
        if (kGateUp) load_shared(two[i], from + 2 * kColumns * 4);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
        total = add_rn(total, one[i]);
        if (kGateUp) up = add_rn(up, two[i]);
    }
}

template <bool kGateUp>
__device__ inline void add_pieces(u32 from, int step, int count, float& total, float& up) {
    constexpr int kAtOnce = 16;
#pragma unroll 1
    for (; count >= kAtOnce; count -= kAtOnce) add_pieces_at_once<kGateUp, kAtOnce>(from, step, total, up);
#pragma unroll 1
    for (; count > 0; --count) add_pieces_at_once<kGateUp, 1>(from, step, total, up);
}

// The warps that add pieces up, a set each: of those that attention needs least of right after the joint projection.
__device__ inline int finisher() { return this_thread() / kWarp; }

// One warp's part in a stage: the sums of all pieces of this block's sets, its half of one first.
template <typename Weights>
struct Summer {
    using Place = typename Ring<Weights>::Place;
    const Ring<Weights> ring;
    const Cut& cut;
    Place place;
    Part<Weights> part;                // the item that is summed next

    __device__ Summer(const Ring<Weights>& r, const Cut& c, Place p) : ring(r), cut(c), place(p) {
        // What the stage's input does not decide, while that is on its way.
        const int warp = this_thread() / kWarp, own = num_own(cut.has_half());
        if (warp < own) ring.take(part, first_box(), warp, own, cut.gate_up);
        else part = {};
    }

    // Piece sums of several sets at a time go to one of two buffers in shared memory in turn; then a warp a set adds its pieces
    // and gives each lane's total, and that of its up column if it has one, to `finish(round, set, lane, total, up)`. The
    // lower half of a set hands its totals on in `half_words`, as of `epoch()`. Called once; `place` is then the next stage's.
    template <typename Epoch, typename Finish>
    __device__ void sum(const Codes& x, u32 buffers, u64* const& half_words, Epoch epoch, Finish finish) {
        const int warp = this_thread() / kWarp, lane = this_thread() % kWarp;
        // Where four columns of a piece's sums go, and whence a lane adds those of its column. What of the cut is not needed
        // for every item is read when it is needed: registers are scarce.
        const int items_are_pairs = cut.items_are_pairs, gate_up = cut.gate_up, row_bytes = cut.width() * 4;
        const int column = lane % 8 * 4, to = (items_are_pairs ? column % kColumns : column) * 4;
        auto own_column = [&] { return lane % (cut.items_are_pairs ? kColumns : kWarp) * 4; };
        auto set_bytes = [&] { return cut.sums_of_set() * 4; };
        auto whole = [&](int which) { return buffers + which * cut.sets_at_once * set_bytes(); };
        auto half = [&] { return half_words + blockIdx.x / 2 * 2 * kWarp + lane; };
        int round = 0, which = 0, count = 0;
        bool is_taken = true;
        for (int set = cut.has_half() ? -1 : (int)blockIdx.x; set < cut.num_whole();) {
            const bool is_half = set < 0;
            const u32 buffer = (is_half ? whole(2) : whole(which) + count * set_bytes()) + to;
            const int first = is_half && cut.is_upper() ? cut.half_items() : 0, own = num_own(is_half);
            Place box = first_box();
            for (int i = warp; i < own; i += kWarps, box = ring.step(box, kWarps / kBoxItems)) {
                if (!is_taken) ring.take(part, box, i, own, gate_up);
                is_taken = false;
                const int item = first + i, piece = items_are_pairs ? 2 * item + column / kColumns : item >> gate_up;
                const float4 sum = sum_item<Weights>(part, x, piece);
                if (lane >= 24) store_shared(buffer + piece * row_bytes + (gate_up & item) * 2 * kColumns * 4, sum);
            }
            is_taken = false;
            place = ring.step(place, (own + kBoxItems - 1) / kBoxItems);
            if (is_half) {
                set = blockIdx.x;
                if (cut.is_upper()) continue;
                sync_few();
                if (warp == kWarps - 1) {
                    float total = 0.0f, up = 0.0f;
                    add_pieces<true>(whole(2) + own_column(), row_bytes, cut.half_pieces(), total, up);
                    publish(half(), total, epoch()), publish(half() + kWarp, up, epoch());
                }
                continue;
            }
            set += gridDim.x;
            if (++count < cut.sets_at_once && set < cut.num_whole()) continue;
            sync_few();
            const int which_set = finisher();
            if (which_set >= 0 && which_set < count) {
                const u32 from = whole(which) + which_set * set_bytes() + own_column();
                float total = 0.0f, up = 0.0f;
                if (gate_up) add_pieces<true>(from, row_bytes, cut.num_pieces, total, up);
                else add_pieces<false>(from, row_bytes, cut.num_pieces, total, up);
                finish(round + which_set, set - (count - which_set) * (int)gridDim.x, lane, total, up);
            }
            round += count, which ^= 1, count = 0;
        }
        if (cut.has_half() && cut.is_upper() && warp == kWarps - 1) {
            Word lower[2];
            lower[0].load(half()), lower[1].load(half() + kWarp);
            const u32 wanted = epoch();
            float total = __uint_as_float(lower[0].await(half(), wanted));
            float up = __uint_as_float(lower[1].await(half() + kWarp, wanted));
            const int lower_pieces = cut.half_pieces();
            const u32 from = whole(2) + own_column() + lower_pieces * row_bytes;
            add_pieces<true>(from, row_bytes, cut.num_pieces - lower_pieces, total, up);
            finish(round, cut.num_whole() + blockIdx.x / 2, lane, total, up);
        }
    }

  private:
    // Items of a set, or of this block's half of one.
    __device__ int num_own(bool is_half) const {
        return !is_half ? cut.num_items : cut.is_upper() ? cut.num_items - cut.half_items() : cut.half_items();
    }

    __device__ Place first_box() const { return ring.step(place, this_thread() / kWarp / kBoxItems); }
};
