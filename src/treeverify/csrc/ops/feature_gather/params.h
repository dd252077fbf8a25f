// What a feature_gather launch needs. Shapes: [batch, width], [batch, columns], outputs [rows, columns]; all but the
// features contiguous.
#pragma once

#include <cstdint>

namespace treeverify {

constexpr int kMaxGatherWidth = 257;

struct FeatureGatherParams {
  const char* features;   // [batch * width] rows of row_bytes
  const int32_t* path;    // [batch, columns]
  const int32_t* lengths;  // [batch]
  const void* slots;       // int32 or int64 [batch, width]
  const void* prefix_lengths;  // int32 or int64 [batch]
  char* packed;                // [rows, columns] rows of row_bytes
  int64_t* packed_slots;       // [rows, columns]
  int64_t* positions;          // [rows, columns]
  int64_t row_bytes;
  int64_t stride_bytes;  // between rows of `features`
  int32_t rows;  // at least batch; the requests past the batch are padding
  int32_t batch;
  int32_t width;
  int32_t columns;  // depth + 1
  bool slots_is_64;
  bool prefix_is_64;
};

}  // namespace treeverify
