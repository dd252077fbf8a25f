// Which draft columns a node sees, and integer arrays of either width. Prefix columns are never asked about.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"
#include "ops/tree_attention/params.h"

namespace treeverify {

__device__ __forceinline__ int64_t load_integer(const void* array, bool is_64, int64_t index) {
  return is_64 ? static_cast<const int64_t*>(array)[index] : static_cast<const int32_t*>(array)[index];
}

// The draft columns of one request's mask, whatever its kind, as bytes. Small on purpose: it is made where it is needed.
class DraftMask {
 public:
  // `prefix` is the request's length.
  __device__ __forceinline__ DraftMask(const TreeAttentionParams& p, int request, int prefix)
      : bits_(p.mask_kind == MaskKind::kBits), base_(static_cast<const uint8_t*>(p.mask)) {
    if (p.mask_kind == MaskKind::kFlat) {
      stride_ = prefix + p.nodes;
      base_ += load_integer(p.mask_indptr, p.mask_indptr_is_64, request) + prefix;
    } else {
      stride_ = p.mask_words * 8;
      base_ += static_cast<int64_t>(request) * p.nodes * stride_;
    }
  }

  // May node `node` see draft column `column`, both in 0..nodes-1? Not for kCausal, which has no mask.
  __device__ __forceinline__ bool sees(int node, int column) const {
    const uint8_t byte = base_[node * stride_ + (bits_ ? column >> 3 : column)];
    return bits_ ? (byte >> (column & 7)) & 1 : byte != 0;
  }

 private:
  bool bits_;
  int stride_;  // bytes from node to node; node * stride_ stays below 2^31
  const uint8_t* base_;
};

// Does any node see this column? Eight neighbouring lanes share a column and split the nodes; all 32 lanes must call.
__device__ __forceinline__ bool any_node_sees(const TreeAttentionParams& p, int request, int prefix, int column) {
  if (p.mask_kind == MaskKind::kCausal) return true;
  uint32_t any = 0;
  if (column >= 0 && column < p.nodes) {
    const DraftMask mask(p, request, prefix);
#pragma unroll 1
    for (int node = cold_thread() & 7; node < p.nodes; node += 8) any |= mask.sees(node, column);
  }
  for (int distance = 1; distance < 8; distance *= 2) any |= __shfl_xor_sync(0xffffffffu, any, distance);
  return any != 0;
}

// May packed row `row` (node * heads + head) of the request see draft column `column`? Prefix columns (negative) always,
// columns and rows beyond the last node never.
__device__ __forceinline__ bool row_sees(const TreeAttentionParams& p, int request, int prefix, int row, int column) {
  const int node = row / p.heads;
  if (column < 0) return true;
  if (column >= p.nodes || node >= p.nodes) return false;
  if (p.mask_kind == MaskKind::kCausal) return column <= node;
  return DraftMask(p, request, prefix).sees(node, column);
}

}  // namespace treeverify
