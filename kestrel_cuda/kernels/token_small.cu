// One row through every layer and lm_head in one launch, for smaller heads; apart from token.cu, so that common models
// do not wait for these to compile. token.cuh says how.

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

TOKEN(int8_32, Int8Weights, 32)
TOKEN(int8_64, Int8Weights, 64)
TOKEN(int4_32, Int4Weights, 32)
TOKEN(int4_64, Int4Weights, 64)
