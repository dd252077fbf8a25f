// Packs the accepted nodes' feature rows, slots and positions; rows past the path, or past the batch, are zeros.
//
// A block copies one part (kPartBytes) of one packed row, in units of 16, 4 or 1 bytes. The block of a row's first part
// also writes its slot and position. Padding is written, not skipped: nothing downstream meets stale bytes.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "ops/feature_gather/params.h"

namespace treeverify {

constexpr int kGatherThreads = 256;
constexpr int64_t kPartBytes = 16 * 1024;

__device__ __forceinline__ int64_t gather_integer(const void* array, bool is_64, int64_t index) {
  return is_64 ? static_cast<const int64_t*>(array)[index] : static_cast<const int32_t*>(array)[index];
}

template <class Unit>
__global__ void __launch_bounds__(kGatherThreads)
    smxx_feature_gather(const __grid_constant__ FeatureGatherParams p, int32_t parts) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) / parts;  // of [rows, columns]
  const int part = static_cast<int>(blockIdx.x) % parts;
  const int64_t request = row / p.columns;
  const int place = static_cast<int>(row % p.columns);
  const bool known = request < p.batch && place < p.lengths[request];
  const int node = known ? p.path[row] : -1;
  const bool accepted = node >= 0 && node < p.width && place < p.width;
  if (part == 0 && threadIdx.x == 0) {
    p.packed_slots[row] = accepted ? gather_integer(p.slots, p.slots_is_64, request * p.width + place) : 0;
    p.positions[row] = accepted ? gather_integer(p.prefix_lengths, p.prefix_is_64, request) + place : 0;
  }
  const auto* source = reinterpret_cast<const Unit*>(p.features + (request * p.width + node) * p.stride_bytes);
  auto* target = reinterpret_cast<Unit*>(p.packed + row * p.row_bytes);
  const int64_t units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  constexpr int64_t kUnits = kPartBytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t end = min(units, (part + 1) * kUnits);
  for (int64_t i = part * kUnits + threadIdx.x; i < end; i += kGatherThreads) target[i] = accepted ? source[i] : Unit{};
}

}  // namespace treeverify
