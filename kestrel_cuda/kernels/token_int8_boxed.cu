// One row through every layer and lm_head in one launch, for 8-bit weights, heads of 128 channels and a context of any
// number of splits, copied into shared memory; token.cuh says how.

#include "common.cuh"
#include "attention_half.cuh"
#include "kv_rows.cuh"
#include "attention_held.cuh"
#include "attention_few.cuh"
#include "token_words.cuh"
#include "token_merge.cuh"
#include "barriers.cuh"
#include "warpgroup.cuh"
#include "copy_engine.cuh"
#include "token_ring.cuh"
#include "token_boxes.cuh"
#include "token_slice.cuh"
#include "token_sums.cuh"
#include "token_state.cuh"
#include "token_inputs.cuh"
#include "token_attend.cuh"
#include "token.cuh"

TOKEN(int8_128_boxed, Int8Weights, 128, kBoxed)
