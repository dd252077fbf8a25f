// The greedy acceptance walk: one warp per request. All lanes look for the lowest-numbered child that carries the sample.
// The tree is read into shared memory first, all of it at once, as the walk itself could only wait for one load at a time.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "ops/tree_accept/params.h"

namespace treeverify {

constexpr int kNoChild = INT32_MAX;

struct AcceptShared {
  int64_t tokens[kMaxAcceptWidth];
  int64_t samples[kMaxAcceptWidth];
  int32_t parents[kMaxAcceptWidth];
};

__global__ void __launch_bounds__(32) smxx_tree_accept(const __grid_constant__ TreeAcceptParams p) {
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t request = blockIdx.x;
  int32_t* path = p.path + request * p.columns;
  int64_t* new_tokens = p.new_tokens + request * p.width;
  __shared__ AcceptShared s;
#pragma unroll 4
  for (int node = lane; node < p.width; node += 32) {
    s.tokens[node] = p.tokens[request * p.width + node];
    s.samples[node] = p.samples[request * p.width + node];
    s.parents[node] = p.parents[request * p.width + node];
  }
  __syncwarp();

  int node = 0, length = 0;
  int64_t wanted = 0;
  while (true) {
    wanted = s.samples[node];
    if (lane == 0) {
      path[length] = node;
      new_tokens[length] = wanted;
    }
    if (++length == p.columns) break;
    int child = kNoChild;
    for (int other = node + 1 + lane; other < p.width; other += 32) {
      if (s.parents[other] == node && s.tokens[other] == wanted) child = min(child, other);
    }
    child = static_cast<int>(__reduce_min_sync(0xffffffffu, static_cast<unsigned>(child)));
    if (child == kNoChild) break;
    node = child;
  }
  for (int i = length + lane; i < p.columns; i += 32) path[i] = -1;
  for (int i = length + lane; i < p.width; i += 32) new_tokens[i] = -1;
  if (lane == 0) {
    p.lengths[request] = length;
    p.bonus[request] = wanted;
  }
}

}  // namespace treeverify
