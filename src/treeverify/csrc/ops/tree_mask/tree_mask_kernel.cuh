// Masks, positions and links of draft trees, from their parents: one block per request.
//
// A thread follows one node's parents up to the root, setting a bit in the node's row for each; all outputs are then
// written from the rows in shared memory. A parent that is not a smaller node counts as none (the root, and padding).
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "ops/tree_mask/params.h"

namespace treeverify {

constexpr int kMaskThreads = 256;

struct MaskShared {
  int32_t parents[kMaxMaskWidth];
  uint64_t rows[kMaxMaskWidth][kMaxMaskWords];
  int64_t begin;  // of the request's cells in full_mask
};

__device__ __forceinline__ int64_t prefix_length(const TreeMaskParams& p, int request) {
  return p.prefix_is_64 ? static_cast<const int64_t*>(p.prefix_lengths)[request]
                        : static_cast<const int32_t*>(p.prefix_lengths)[request];
}

// Cells of full_mask before this request's; all 32 lanes of a warp must call.
__device__ __forceinline__ int64_t cells_before(const TreeMaskParams& p, int request, int lane) {
  int64_t prefixes = 0;
  for (int other = lane; other < request; other += 32) prefixes += prefix_length(p, other);
  for (int distance = 16; distance > 0; distance /= 2) prefixes += __shfl_xor_sync(0xffffffffu, prefixes, distance);
  return p.width * (prefixes + static_cast<int64_t>(request) * p.width);
}

// The next node after `node` whose parent is `parent`; -1 if there is none.
__device__ __forceinline__ int next_child(const MaskShared& s, int node, int parent, int width) {
  for (int other = node + 1; other < width; ++other) {
    if (s.parents[other] == parent) return other;
  }
  return -1;
}

// One row of cells for each warp in turn; `target` is column 0 of node 0, `stride` cells lie between the nodes' rows.
__device__ __forceinline__ void write_cells(const MaskShared& s, uint8_t* target, int64_t stride, int width) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int node = thread / 32; node < width; node += kMaskThreads / 32) {
    for (int column = thread % 32; column < width; column += 32) {
      target[node * stride + column] = static_cast<uint8_t>((s.rows[node][column / 64] >> (column % 64)) & 1);
    }
  }
}

__global__ void __launch_bounds__(kMaskThreads) smxx_tree_mask(const __grid_constant__ TreeMaskParams p) {
  __shared__ MaskShared s;
  const int request = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int words = (p.width + 63) / 64;
  const int64_t first = static_cast<int64_t>(request) * p.width;
  const int64_t prefix = prefix_length(p, request);
  for (int node = thread; node < p.width; node += kMaskThreads) {
    const int parent = p.parents[first + node];
    s.parents[node] = parent >= 0 && parent < node ? parent : -1;
  }
  if (p.full_mask != nullptr && thread < 32) {
    const int64_t begin = cells_before(p, request, thread);
    if (thread == 0) s.begin = begin;
  }
  __syncthreads();
  for (int node = thread; node < p.width; node += kMaskThreads) {
    for (int word = 0; word < words; ++word) s.rows[node][word] = 0;
    int depth = -1;
    for (int at = node; at >= 0; at = s.parents[at], ++depth) s.rows[node][at / 64] |= uint64_t{1} << (at % 64);
    if (p.positions != nullptr) p.positions[first + node] = prefix + depth;
    if (p.retrieve != nullptr) {
      const int parent = s.parents[node];
      const int64_t plane = static_cast<int64_t>(p.batch) * p.width;
      p.retrieve[first + node] = first + node;
      p.retrieve[plane + first + node] = next_child(s, node, node, p.width);
      p.retrieve[2 * plane + first + node] = parent < 0 ? -1 : next_child(s, node, parent, p.width);
    }
  }
  __syncthreads();
  if (p.bits != nullptr) {
    for (int i = thread; i < p.width * words; i += kMaskThreads) {
      p.bits[first * words + i] = s.rows[i / words][i % words];
    }
  }
  if (p.qlen_mask != nullptr) write_cells(s, p.qlen_mask + first * p.width, p.width, p.width);
  if (p.full_mask != nullptr) write_cells(s, p.full_mask + s.begin + prefix, prefix + p.width, p.width);
}

}  // namespace treeverify
