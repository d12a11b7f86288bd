// One row through every layer and lm_head in one launch, for smaller heads; token.cuh says how.

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

TOKEN(int8_32_held, Int8Weights, 32, kHeld)
TOKEN(int8_64_held, Int8Weights, 64, kHeld)
TOKEN(int4_32_held, Int4Weights, 32, kHeld)
TOKEN(int4_64_held, Int4Weights, 64, kHeld)
