// What a tree_mask launch needs. An output that is nullptr is not wanted.
#pragma once

#include <cstdint>

namespace treeverify {

constexpr int kMaxMaskWidth = 257;
constexpr int kMaxMaskWords = (kMaxMaskWidth + 63) / 64;

struct TreeMaskParams {
  const int32_t* parents;      // [batch, width]
  const void* prefix_lengths;  // int32 or int64 [batch]
  uint64_t* bits;              // [batch, width, words]
  int64_t* positions;          // [batch * width]
  uint8_t* full_mask;          // per request width x (P + width), one after the other
  uint8_t* qlen_mask;          // [batch, width, width]
  int64_t* retrieve;           // [3, batch, width]: index, next token, next sibling
  int32_t batch;
  int32_t width;
  bool prefix_is_64;
};

}  // namespace treeverify
