// The greedy acceptance walk: one warp per request. All lanes look for the lowest-numbered child that carries the sample.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "ops/tree_accept/params.h"

namespace treeverify {

constexpr int kNoChild = INT32_MAX;

__global__ void __launch_bounds__(32) smxx_tree_accept(const __grid_constant__ TreeAcceptParams p) {
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t request = blockIdx.x;
  const int64_t* tokens = p.tokens + request * p.width;
  const int32_t* parents = p.parents + request * p.width;
  const int64_t* samples = p.samples + request * p.width;
  int32_t* path = p.path + request * p.columns;
  int64_t* new_tokens = p.new_tokens + request * p.width;

  int node = 0, length = 0;
  int64_t wanted = 0;
  while (true) {
    wanted = samples[node];
    if (lane == 0) {
      path[length] = node;
      new_tokens[length] = wanted;
    }
    if (++length == p.columns) break;
    int child = kNoChild;
    for (int other = node + 1 + lane; other < p.width; other += 32) {
      if (parents[other] == node && tokens[other] == wanted) child = min(child, other);
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
