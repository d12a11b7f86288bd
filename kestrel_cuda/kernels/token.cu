// One row through every layer and lm_head in one launch, for heads of 128 channels; token.cuh says how.

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
#include "token_sums.cuh"
#include "token.cuh"

TOKEN(int8_128, Int8Weights, 128)
TOKEN(int4_128, Int4Weights, 128)
