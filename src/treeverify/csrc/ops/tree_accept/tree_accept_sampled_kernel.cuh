// The acceptance walk with samples drawn on the way: a group of blocks per request, which reads the logits of visited
// nodes only. Every block of the group walks; the first one writes.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "device/order.cuh"
#include "ops/tree_accept/draw.cuh"
#include "ops/tree_accept/params.h"

namespace treeverify {

// The target's token after a node, the `step`-th on the path; kNoToken if the row of logits is no law.
template <class T>
__device__ __forceinline__ int64_t target_token(DrawShared& s, Team& team, const TreeAcceptSampledParams& p, int request,
                                                int node, int step) {
  const T* row = static_cast<const T*>(p.logits) + (static_cast<int64_t>(request) * p.tree.width + node) * p.logits_stride;
  const uint64_t best = best_token(s, team, row);
  const float peak = from_ordered_bits(static_cast<uint32_t>(best >> 32));
  if (!(peak < INFINITY) || peak == -INFINITY) return kNoToken;
  const float temperature = p.temperature[request];
  const int top_k = p.top_k[request];
  if (!(temperature >= kGreedyBelow) || top_k <= 1) return static_cast<int64_t>(~static_cast<uint32_t>(best));
  const Law law{1.0f / temperature, p.top_p[request], fminf(p.min_p[request], 1.0f), top_k, peak};
  const Cut cut = filter(s, team, row, p.vocab, law);
  return draw(s, team, row, p.vocab, law, cut, p.uniforms[static_cast<int64_t>(request) * p.tree.columns + step]);
}

template <class T>
__global__ void __launch_bounds__(kDrawThreads)
    smxx_tree_accept_sampled(const __grid_constant__ TreeAcceptSampledParams p) {
  __shared__ DrawShared s;
  __shared__ Team team;
  __shared__ int child;
  const int thread = static_cast<int>(threadIdx.x), request = static_cast<int>(blockIdx.x) / p.blocks;
  const int width = p.tree.width, columns = p.tree.columns;
  const int64_t* tokens = p.tree.tokens + static_cast<int64_t>(request) * width;
  const int32_t* parents = p.tree.parents + static_cast<int64_t>(request) * width;
  int32_t* path = p.tree.path + static_cast<int64_t>(request) * columns;
  int64_t* new_tokens = p.tree.new_tokens + static_cast<int64_t>(request) * width;

  join_group(team, p, request, kSegment);
  const bool writes = team.index == 0;
  int node = 0, length = 0;
  int64_t wanted = 0;
  while (true) {
    wanted = target_token<T>(s, team, p, request, node, length);
    if (thread == 0) child = width;
    if (thread == 0 && writes) {
      path[length] = node;
      new_tokens[length] = wanted;
    }
    ++length;
    if (length == columns || wanted == kNoToken) break;
    __syncthreads();
    const int other = node + 1 + thread;
    if (other < width && parents[other] == node && tokens[other] == wanted) atomicMin(&child, other);
    __syncthreads();
    node = child;
    __syncthreads();
    if (node == width) break;
  }
  if (!writes) return;
  for (int i = length + thread; i < columns; i += kDrawThreads) path[i] = -1;
  for (int i = length + thread; i < width; i += kDrawThreads) new_tokens[i] = -1;
  if (thread == 0) {
    p.tree.lengths[request] = length;
    p.tree.bonus[request] = wanted;
  }
}

}  // namespace treeverify
