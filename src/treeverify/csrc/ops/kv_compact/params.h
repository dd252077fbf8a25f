// What a kv_compact launch needs. Shapes: [batch, width], [batch, columns], contiguous.
#pragma once

#include <cstdint>

namespace treeverify {

constexpr int kMaxCompactWidth = 257;

struct KvCompactParams {
  const int64_t* pools;    // [layers]: address of row 0 of each layer's pool
  const void* slots;       // int32 or int64 [batch, width]
  const int32_t* path;     // [batch, columns]
  const int32_t* lengths;  // [batch]
  int64_t row_bytes;       // a multiple of unit
  int64_t stride_bytes;    // from row to row, a multiple of unit
  int32_t layers;
  int32_t batch;
  int32_t width;
  int32_t columns;
  int32_t unit;  // bytes that addresses, row size and stride are multiples of: 16, 8, 4, 2 or 1
  bool slots_is_64;
};

}  // namespace treeverify
