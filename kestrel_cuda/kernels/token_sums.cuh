// The sums of a linear: items by warps out of their rings, pieces added up in ascending order. gemv.cu's to the bit. Knows
// no stage's meaning.

// Activation codes of a block in shared memory.
struct Codes {
    i8* codes;
    float* scales;
};

// Sums of an item for four columns, complete in lanes 24 on: each lane makes the exact dots and factors of its group, and
// the sums are carried on from the lanes of one group to those of the next.
template <typename Weights>
__device__ inline float4 sum_item(const typename Ring<Weights>::Part& part, const Codes& x, int piece) {
    const int lane = threadIdx.x % kWarp, group = piece * kGroupsPerPiece + lane / 8;
    const uint4* codes = (const uint4*)(x.codes + group * kGroup);
    const uint4 low = codes[0], high = codes[1];
    const u32 x_words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const float x_scale = x.scales[group];
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

// Pieces [first, end) of a set, added to what the totals are, in the lane's column and in its up column if there is one.
__device__ inline void add_pieces(const Cut& cut, const float* sums, int first, int end, float& total, float& up) {
    const int width = cut.width();
    const float* from = sums + (threadIdx.x & (min(kWarp, width) - 1));
    const int second = cut.gate_up ? 2 * kColumns : 0;
#pragma unroll 16
    for (int piece = first; piece < end; ++piece) {
        total = add_rn(total, from[piece * width]);
        up = add_rn(up, from[piece * width + second]);
    }
}

// Sums of all pieces of this block's sets, its half of one first. Piece sums of several sets at a time go to one of two
// buffers of `sums` in turn; then a warp a set adds its pieces and gives each lane's total, and that of its up column if it
// has one, to `finish(round, set, lane, total, up)`. The lower half of a set hands its totals on in `half_words`.
template <typename Weights, typename Finish>
__device__ inline void sum_sets(Ring<Weights>& ring, const Cut& cut, const Codes& x, float* sums, u64* half_words, u32 epoch,
                                Finish finish) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, step = gridDim.x;
    const int num_sets = cut.num_whole(), num_items = cut.num_items, num_pieces = cut.num_pieces, width = cut.width();
    const int column = lane % 8 * 4, items_are_pairs = cut.items_are_pairs, gate_up = cut.gate_up;
    const int sets_at_once = cut.sets_at_once;
    const bool has_half = cut.has_half(), is_upper = cut.is_upper();
    float* const half_sums = sums + 2 * sets_at_once * num_pieces * width;
    auto half = [&] { return half_words + blockIdx.x / 2 * 2 * kWarp + lane; };
    int round = 0, which = 0, count = 0;
    for (int set = has_half ? -1 : (int)blockIdx.x; set < num_sets;) {
        const bool is_half = set < 0;
        float* const whole = sums + which * sets_at_once * num_pieces * width;
        float* const buffer = is_half ? half_sums : whole + count * num_pieces * width;
        const int end = is_half && !is_upper ? cut.half_items() : num_items;
        for (int item = warp + (is_half && is_upper ? cut.half_items() : 0); item < end; item += kWarps) {
            typename Ring<Weights>::Part part;
            ring.take(part);
            ring.fill();
            const int piece = items_are_pairs ? 2 * item + column / kColumns : item >> gate_up;
            const float4 sum = sum_item<Weights>(part, x, piece);
            const int to = (gate_up & item) * 2 * kColumns + (items_are_pairs ? column % kColumns : column);
            if (lane >= 24) *(float4*)&buffer[piece * width + to] = sum;
        }
        if (is_half) {
            set = blockIdx.x;
            if (is_upper) continue;
            __syncthreads();
            if (warp == kWarps - 1) {
                float total = 0.0f, up = 0.0f;
                add_pieces(cut, half_sums, 0, cut.half_pieces(), total, up);
                publish(half(), total, epoch), publish(half() + kWarp, up, epoch);
            }
            continue;
        }
        set += step;
        if (++count < sets_at_once && set < num_sets) continue;
        __syncthreads();
        if (warp < count) {
            float total = 0.0f, up = 0.0f;
            add_pieces(cut, whole + warp * num_pieces * width, 0, num_pieces, total, up);
            finish(round + warp, set - (count - warp) * step, lane, total, up);
        }
        round += count, which ^= 1, count = 0;
    }
    if (has_half && is_upper && warp == kWarps - 1) {
        Word lower[2];
        lower[0].load(half()), lower[1].load(half() + kWarp);
        float total = __uint_as_float(lower[0].await(half(), epoch)), up = __uint_as_float(lower[1].await(half() + kWarp, epoch));
        add_pieces(cut, half_sums, cut.half_pieces(), num_pieces, total, up);
        finish(round, num_sets + blockIdx.x / 2, lane, total, up);
    }
}
