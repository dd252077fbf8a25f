// What the draft_topk launches need.
//
// A packed result is int64 [batch, depth, k + 1]: k candidates, best first, each the ordered bits of the logit (high) and
// the complement of the token id (low) as one unsigned number whose top bit is flipped, so that the signed ones compare
// alike; then the bit patterns of the largest logit (high) and of the sum of exp(logit - that) (low).
#pragma once

#include <cstdint>

namespace treeverify {

constexpr int kMaxRanks = 256;         // k
constexpr int kTileColumns = 8192;     // that one block ranks
constexpr int64_t kMaxTopkVocab = int64_t{1} << 23;

// Ranks each tile of each row: packed results [tiles, rows, k + 1].
struct TopkTileParams {
  const void* logits;      // float32 or bfloat16 [batch, depth, vocab]
  int64_t request_stride;  // elements
  int64_t depth_stride;    // elements
  int64_t* packed;
  int32_t batch;
  int32_t depth;
  int32_t vocab;
  int32_t k;
  int32_t tiles;
  int32_t first_id;  // token id of column 0
  bool is_bf16;
};

// Merges packed results [parts, rows, k + 1] into one per row, or into log-probabilities and ids.
struct TopkMergeParams {
  const int64_t* parts;
  int64_t* packed;     // [rows, k + 1]; nullptr: write the two below
  float* log_probs;    // [rows, k]
  int64_t* token_ids;  // [rows, k]
  int32_t count;       // parts
  int32_t rows;
  int32_t k;
};

}  // namespace treeverify
