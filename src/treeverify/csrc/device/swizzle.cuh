// Shared-memory layout of query and KV rows: 1152 bytes a row, no padding, 16-byte chunks permuted within 128 bytes.
//
// 1152 = 9 * 128, so every row starts in bank 0. Chunk c of row r lies where chunk c ^ (r % 8) would, the exclusive or
// taken in the low three bits: eight rows at one chunk, and eight chunks of one row, cover all 32 banks. Both ldmatrix
// forms and the 16-byte copies are therefore free of conflicts.
#pragma once

#include <cstdint>

#include "ops/tree_attention/params.h"

namespace treeverify {

constexpr int kRowBytes = kRow * 2;          // bf16
constexpr int kChunkGroups = kRowBytes / 128;  // 9: groups of eight chunks

// Byte offset of chunk `chunk` (0..7) of the first group of row `row`; group g lies 128 * g bytes further.
__device__ __forceinline__ uint32_t swizzled_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
}

}  // namespace treeverify
