// What a tree_accept launch needs. Shapes: [batch, width], [batch, columns], all but the logits contiguous.
#pragma once

#include <cstdint>

namespace treeverify {

constexpr int kMaxAcceptWidth = 257;
constexpr int64_t kMaxVocab = int64_t{1} << 20;
constexpr int64_t kDrawGroupBytes = 98832;  // of workspace, for each request of a sampled walk

struct TreeAcceptParams {
  const int64_t* tokens;   // [batch, width]
  const int32_t* parents;  // [batch, width]
  const int64_t* samples;  // [batch, width]; greedy walk only
  int32_t* path;           // [batch, columns]
  int32_t* lengths;        // [batch]
  int64_t* new_tokens;     // [batch, width]
  int64_t* bonus;          // [batch]
  int32_t batch;
  int32_t width;
  int32_t columns;  // depth + 1
};

struct TreeAcceptSampledParams {
  TreeAcceptParams tree;
  const void* logits;    // float32 or bfloat16 [batch * width, vocab]
  int64_t logits_stride;  // elements between rows
  const float* temperature;  // [batch]
  const int32_t* top_k;      // [batch]
  const float* top_p;        // [batch]
  const float* min_p;        // [batch]
  const double* uniforms;    // [batch, columns]
  void* groups;              // DrawGroup [batch], any bytes
  int32_t blocks;            // for each request; the launch sets it
  int32_t vocab;
  bool is_bf16;
};

}  // namespace treeverify
