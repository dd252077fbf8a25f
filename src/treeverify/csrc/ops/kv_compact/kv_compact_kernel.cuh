// Moves the accepted rows of all layers to the front of each request's slots, in place.
//
// A thread owns one unit (16, 4 or 1 bytes) of every row of one request in one layer, and moves it for all rows of the
// path, in rising order. Nobody else touches those bytes, so only the order within the thread matters: the path rises
// from 0, so move j reads row path[j] >= j, and that row is written by move path[j] at the earliest, never before. Hence
// the reads of a few moves may also come before their writes, which hides their latency.
//
// Blocks: request = block % batch; block / batch counts along the units of all layers.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "ops/kv_compact/params.h"

namespace treeverify {

constexpr int kCompactThreads = 128;
constexpr int kMovesInFlight = 4;

// The moves of a request: rows from slots[path[j]] to slots[j], for j below `end`.
struct CompactShared {
  int64_t sources[kMaxCompactWidth];
  int64_t destinations[kMaxCompactWidth];
  int end;
  bool identity;
};

__device__ __forceinline__ int64_t compact_slot(const KvCompactParams& p, int64_t index) {
  return p.slots_is_64 ? static_cast<const int64_t*>(p.slots)[index] : static_cast<const int32_t*>(p.slots)[index];
}

// Fills `s`: all moves up to the first node that does not rise from 0 within the width.
__device__ __forceinline__ void plan_moves(const KvCompactParams& p, CompactShared& s, int request) {
  const int32_t* path = p.path + static_cast<int64_t>(request) * p.columns;
  const int64_t slots = static_cast<int64_t>(request) * p.width;
  const int length = min(max(p.lengths[request], 0), p.columns);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    s.end = length;
    s.identity = true;
  }
  __syncthreads();
  for (int j = thread; j < length; j += kCompactThreads) {
    const int node = path[j];
    const bool good = j == 0 ? node == 0 : node > path[j - 1] && node < p.width;
    if (!good) atomicMin(&s.end, j);
    s.sources[j] = good ? compact_slot(p, slots + node) : 0;
    s.destinations[j] = j < p.width ? compact_slot(p, slots + j) : 0;
  }
  __syncthreads();
  for (int j = thread; j < s.end; j += kCompactThreads) {
    if (s.sources[j] != s.destinations[j]) s.identity = false;
  }
  __syncthreads();
}

template <class Unit>
__global__ void __launch_bounds__(kCompactThreads) smxx_kv_compact(const __grid_constant__ KvCompactParams p) {
  __shared__ CompactShared s;
  const int batch = p.batch;
  const int request = static_cast<int>(blockIdx.x) % batch;
  plan_moves(p, s, request);
  if (s.identity) return;
  const int64_t units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t index = static_cast<int64_t>(blockIdx.x) / batch * kCompactThreads + threadIdx.x;
  if (index >= units * p.layers) return;
  char* pool = reinterpret_cast<char*>(p.pools[index / units]) + index % units * static_cast<int64_t>(sizeof(Unit));
  const int end = s.end;
  for (int begin = 0; begin < end; begin += kMovesInFlight) {
    Unit values[kMovesInFlight];
#pragma unroll
    for (int i = 0; i < kMovesInFlight; ++i) {
      const int j = begin + i;
      if (j < end && s.sources[j] != s.destinations[j]) {
        values[i] = *reinterpret_cast<const Unit*>(pool + s.sources[j] * p.stride_bytes);
      }
    }
#pragma unroll
    for (int i = 0; i < kMovesInFlight; ++i) {
      const int j = begin + i;
      if (j < end && s.sources[j] != s.destinations[j]) {
        *reinterpret_cast<Unit*>(pool + s.destinations[j] * p.stride_bytes) = values[i];
      }
    }
  }
}

}  // namespace treeverify
