// What a tree_build launch needs. Shapes: [batch, depth, k] and [batch, width], all contiguous.
#pragma once

#include <cstdint>

namespace treeverify {

constexpr int kMaxBudget = 256;  // nodes beside the root
constexpr int kMaxDepth = 32;
constexpr int kMaxCandidates = 256;  // k

struct TreeBuildParams {
  const float* log_probs;    // [batch, depth, k]
  const int64_t* token_ids;  // [batch, depth, k]
  const int64_t* roots;      // [batch]
  int64_t* tokens;           // [batch, width]
  int32_t* parents;          // [batch, width]
  int32_t* depths;           // [batch, width]
  float* scores;             // [batch, width]
  int32_t* widths;           // [batch]
  int32_t batch;
  int32_t depth;
  int32_t k;
  int32_t width;  // budget + 1
};

}  // namespace treeverify
