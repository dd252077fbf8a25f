// The slots of a step and the drafter's block: one block of threads per request, one thread per column.
//
// A place outside the table, as in the padded requests of a captured graph, is slot 0 and is not read.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "ops/draft_window/params.h"

namespace treeverify {

constexpr int kWindowThreads = 128;

__device__ __forceinline__ int64_t window_integer(const void* array, bool is_64, int64_t index) {
  return is_64 ? static_cast<const int64_t*>(array)[index] : static_cast<const int32_t*>(array)[index];
}

__global__ void __launch_bounds__(kWindowThreads) smxx_draft_window(const __grid_constant__ DraftWindowParams p) {
  const int64_t request = blockIdx.x;
  const int64_t row = window_integer(p.request_rows, p.rows_is_64, request);
  const int64_t length = window_integer(p.lengths, p.lengths_is_64, request);
  const int64_t root = window_integer(p.roots, p.roots_is_64, request);
  const bool known = row >= 0 && row < p.rows && length >= 0;
  for (int column = static_cast<int>(threadIdx.x); column < p.width; column += kWindowThreads) {
    const bool inside = known && length < p.columns - column;
    const int64_t slot = inside ? p.slot_table[row * p.columns + length + column] : 0;
    p.slots[request * p.width + column] = slot;
    if (column < p.block) {
      const int64_t place = request * p.block + column;
      p.block_slots[place] = slot;
      p.ids[place] = column > 0 ? p.mask_token : max(root, int64_t{0});
      p.positions[place] = length + column;
    }
  }
}

}  // namespace treeverify
