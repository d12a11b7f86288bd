// The kernels of few queries over either kind of cache, to be stamped out by attention_few.cu and attention_few_q8.cu.

// Few queries: one block a (split, kv head, query) writes that split's maximum, sum and weighted values, merged by
// attend_merge. q_mhd [m][heads][d]; k, v [kv_heads][ctx] rows; max_mhs, sum_mhs [m][heads][splits];
// out_mhsd [..][splits][d]. Dynamic shared memory: 4 * queries_per_kv * d floats. Grid: (splits, kv_heads, m).
template <int kHeadDim, typename Rows>
__device__ inline void attend_split(const float* q_mhd, const Rows& k, const Rows& v, const int* position, float* max_mhs,
                                    float* sum_mhs, float* out_mhsd, int queries_per_kv, int ctx, float scale) {
    extern __shared__ __align__(16) float parts[];
    __shared__ FewQueries<kHeadDim, typename Rows::New> queries;
    __shared__ FewWeights shared;
    const int split = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
    const int num_splits = gridDim.x, num_heads = gridDim.y * queries_per_kv;
    const int last = *position + row, first_slot = split * kSplit;
    if (first_slot > last) return;
    const int num_slots = min(kSplit, last + 1 - first_slot);
    const i64 at = ((i64)kv_head * ctx + first_slot) * kHeadDim;
    const HeldSplit<kHeadDim, Rows> held(k.from(at), v.from(at), num_slots);
    const i64 first_head = (i64)row * num_heads + kv_head * queries_per_kv;
    for (int i = threadIdx.x; i < queries_per_kv * kHeadDim; i += kFewThreads)
        queries.put(i / kHeadDim, i % kHeadDim, q_mhd[first_head * kHeadDim + i]);
    __syncthreads();
    split_of_few_rows<kHeadDim>(shared, queries.fragments, held, queries_per_kv, num_slots, scale, parts);
    for (int i = threadIdx.x; i < queries_per_kv * kHeadDim; i += kFewThreads) {
        const i64 to = (first_head + i / kHeadDim) * num_splits + split;
        out_mhsd[to * kHeadDim + i % kHeadDim] = add_subtiles(parts + i, queries_per_kv * kHeadDim, num_slots);
        if (i % kHeadDim == 0) {
            max_mhs[to] = shared.row_max[i / kHeadDim];
            sum_mhs[to] = add_subtiles(shared.sums[i / kHeadDim], 1, num_slots);
        }
    }
}

// One query from the joint projection to the next linear's input, in one kernel. Dynamic shared memory:
// 4 * queries_per_kv * d floats. Grid: (splits, kv_heads).
template <int kHeadDim, typename Cache>
__device__ inline void attend_row(const RowAttention<Cache>& a, const PlainRow& row, const PlainSplits<kHeadDim>& splits,
                                  const PlainCodes& y) {
    extern __shared__ __align__(16) float parts[];
    __shared__ FewQueries<kHeadDim, typename Cache::template Rows<kHeadDim>::New> queries;
    __shared__ FewWeights shared;
    launch_dependents();
    // Read before the wait: the position and the old slots were written before the last plain launch, and between two
    // tokens there is always one.
    if (blockIdx.x >= a.used_splits()) {
        wait_for_previous();
        return;
    }
    const int split = blockIdx.x, kv_head = blockIdx.y;
    const i64 at = a.template at<kHeadDim>(split, kv_head);
    HeldSplit<kHeadDim, typename Cache::template Rows<kHeadDim>> held(a.k.template from<kHeadDim>(at),
                                                                      a.v.template from<kHeadDim>(at), a.num_known(split));
    attend_split_of_row<kHeadDim>(queries, shared, parts, held, a, row, splits, y, split, kv_head, [] { wait_for_previous(); });
}
