// Shared-memory layout of query and KV rows: 1152 bytes a row, no padding, 16-byte chunks permuted within 128 bytes.
//
// 1152 = 9 * 128, so every row starts in bank 0. Chunk c of row r lies where chunk c ^ key(r) would, the exclusive or
// taken in the low three bits. key() differs within rows 0..7, within rows 8..15, and within 0, 8, 1, 9, 2, 10, 3, 11 and
// its complement (the order in which the second product takes keys, softmax.cuh): both ldmatrix forms and the 16-byte
// copies are free of conflicts.
#pragma once

#include <cstdint>

#include "ops/tree_attention/params.h"

namespace treeverify {

constexpr int kRowBytes = kRow * 2;          // bf16
constexpr int kChunkGroups = kRowBytes / 128;  // 9: groups of eight chunks

__device__ __forceinline__ int swizzle_key(int row) { return (row & 7) ^ ((row & 8) >> 1); }

// Byte offset of chunk `chunk` (0..7) of the first group of row `row`; group g lies 128 * g bytes further.
__device__ __forceinline__ uint32_t swizzled_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ swizzle_key(row)) << 4));
}

}  // namespace treeverify
