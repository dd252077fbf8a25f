// Sums over a whole block, in thread order, of unsigned integers: exact, whatever the order of addition.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace treeverify {

struct Scanned {
  uint64_t before;  // sum over the threads before this one
  uint64_t total;   // over all
};

// All threads must call; `warp_sums` [kThreads / 32] is shared memory that may be reused after the call.
template <int kThreads>
__device__ __forceinline__ Scanned block_scan(uint64_t value, uint64_t* warp_sums) {
  constexpr int kWarps = kThreads / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  uint64_t until = value;
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, until, distance);
    if (lane >= distance) until += other;
  }
  if (lane == 31) warp_sums[warp] = until;
  __syncthreads();
  uint64_t warps = lane < kWarps ? warp_sums[lane] : 0;
  for (int distance = 1; distance < kWarps; distance *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, warps, distance);
    if (lane >= distance) warps += other;
  }
  const uint64_t total = __shfl_sync(0xffffffffu, warps, kWarps - 1);
  const uint64_t earlier = __shfl_sync(0xffffffffu, warps, warp == 0 ? 0 : warp - 1);
  __syncthreads();
  return {(warp == 0 ? 0 : earlier) + until - value, total};
}

}  // namespace treeverify
