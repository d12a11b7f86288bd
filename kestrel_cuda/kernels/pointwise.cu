// What stands between the linears: embedding rows, silu(gate) * up, the choice of the next id, the position counter.

#include "common.cuh"

// h_mk [m][k] = row tokens[position + row] of table [vocab][k], kind 0 bf16, 1 f16, 2 f32. Grid: m.
extern "C" __global__ void __launch_bounds__(256)
embed_rows(const void* table, const int* tokens, const int* position, float* h_mk, int table_kind, int k) {
    const i64 token = tokens[*position + (int)blockIdx.x];
    for (int i = threadIdx.x; i < k; i += blockDim.x)
        h_mk[(i64)blockIdx.x * k + i] = table_entry(table, table_kind, token * k + i);
}

// gate_up [m][ld]: gate in columns 0..k, up from up_column -> codes_mk, scales_mg. Grid: (ceil(k_padded / 2048), m).
extern "C" __global__ void __launch_bounds__(kQuantizeThreads)
silu_mul_quantize(const float* gate_up, i8* codes_mk, float* scales_mg, int k, int k_padded, int ld, int up_column) {
    const float *const gate_k = gate_up + (i64)blockIdx.y * ld, *const up_k = gate_k + up_column;
    const bool aligned = ((u64)gate_k | (u64)up_k) % sizeof(float4) == 0;
    const int own = blockIdx.x * kQuantizedInputs + threadIdx.x * kLaneValues;
    float gate[kFoursPerThread][kLaneValues], up[kFoursPerThread][kLaneValues];
#pragma unroll
    for (int j = 0; j < kFoursPerThread; ++j) {
        load_lane_values(gate[j], gate_k, own + j * kFoursApart, k, aligned);
        load_lane_values(up[j], up_k, own + j * kFoursApart, k, aligned);
    }
#pragma unroll
    for (int j = 0; j < kFoursPerThread; ++j) {
        const int i = own + j * kFoursApart;
#pragma unroll
        for (int c = 0; c < kLaneValues; ++c) gate[j][c] = silu_mul(gate[j][c], up[j][c]);
        quantize_lane_values(gate[j], codes_mk, scales_mg, (i64)blockIdx.y * k_padded + i, i < k_padded);
    }
}

// The same without quantizing: y_mk [m][k]. Grid: (ceil(k / 256), m).
extern "C" __global__ void __launch_bounds__(256)
silu_mul_rows(const float* gate_up, float* y_mk, int k, int ld, int up_column) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float* row = gate_up + (i64)blockIdx.y * ld;
    if (i < k) y_mk[(i64)blockIdx.y * k + i] = silu_mul(row[i], row[up_column + i]);
}

// The better of two candidates: the larger logit, the lower id when equal; an id of -1 is no candidate.
__device__ inline void take_better(float& best, int& best_id, float other, int other_id) {
    if (other_id >= 0 && (best_id < 0 || other > best || (other == best && other_id < best_id))) {
        best = other;
        best_id = other_id;
    }
}

__device__ inline void block_best(float& best, int& best_id, float* values, int* ids) {
    for (int step = kWarp / 2; step > 0; step /= 2) {
        const float other = __shfl_down_sync(0xffffffffu, best, step);
        const int other_id = __shfl_down_sync(0xffffffffu, best_id, step);
        take_better(best, best_id, other, other_id);
    }
    if (threadIdx.x % kWarp == 0) {
        values[threadIdx.x / kWarp] = best;
        ids[threadIdx.x / kWarp] = best_id;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 1; w < (int)blockDim.x / kWarp; ++w) take_better(best, best_id, values[w], ids[w]);
}

// Best finite-or-infinite logit of each block's share of logits_v [v]; NaN is never a candidate. Grid: any.
extern "C" __global__ void __launch_bounds__(256)
argmax_partial(const float* logits_v, float* best_b, int* best_id_b, int v) {
    __shared__ float values[8];
    __shared__ int ids[8];
    launch_dependents();
    wait_for_previous();
    float best = 0.0f;
    int best_id = -1;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < v; i += gridDim.x * blockDim.x) {
        const float x = logits_v[i];
        if (x == x) take_better(best, best_id, x, i);
    }
    block_best(best, best_id, values, ids);
    if (threadIdx.x == 0) {
        best_b[blockIdx.x] = best;
        best_id_b[blockIdx.x] = best_id;
    }
}

// Write the best id to tokens[position + num_rows] and move the position on. -1 when every logit is NaN; the row that
// the next embedding reads is then 0, so nothing is read out of bounds. `chosen` [num_chosen] is host memory; it needs
// no fence, as the host reads behind an event recorded after this kernel. Grid: 1.
extern "C" __global__ void __launch_bounds__(256)
argmax_final(const float* best_b, const int* best_id_b, int* tokens, int* position, int* chosen, int num_chosen,
             int num_blocks, int num_rows) {
    __shared__ float values[8];
    __shared__ int ids[8];
    launch_dependents();
    wait_for_previous();
    float best = 0.0f;
    int best_id = -1;
    for (int i = threadIdx.x; i < num_blocks; i += blockDim.x) take_better(best, best_id, best_b[i], best_id_b[i]);
    block_best(best, best_id, values, ids);
    if (threadIdx.x == 0) {
        const int next = *position + num_rows;
        chosen[next % num_chosen] = best_id;
        tokens[next] = max(best_id, 0);
        *position = next;
    }
}

// Move the position on without choosing an id (a prefill chunk that is not the last). Grid: 1.
extern "C" __global__ void advance_position(int* position, int num_rows) { *position += num_rows; }

// target += values. Grid: ceil(count / 256).
extern "C" __global__ void __launch_bounds__(256)
add_values(float* target, const float* values, i64 count) {
    const i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at < count) target[at] = add_rn(target[at], values[at]);
}
