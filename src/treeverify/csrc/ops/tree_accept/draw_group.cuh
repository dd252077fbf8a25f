// Blocks that draw for one request together: each reads its share of a row, and what they find meets in global memory.
//
// Every block then does the rest of the work itself, on the same numbers, so that nobody waits for a leader's answer. All
// blocks must be resident, as they wait for each other: the launch sees to that. A group of one touches no global memory.
//
// What is written for others is read after a meeting, and overwritten only after a further one. Of the two `best` and the
// three histograms each meeting has its own by its number m: the histogram is filled before meeting m, read after it,
// cleared after m + 1 and filled again after m + 2. List and segments are written only after a meeting that follows their
// last use.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "ops/tree_accept/params.h"

namespace treeverify {

constexpr int kDrawThreads = 1024;
constexpr int kDrawBins = 2048;
constexpr int kListed = 3072;
constexpr int kMaxGroup = 32;  // blocks; a lane for each
constexpr int kHistograms = 3;

// In global memory, one for each request.
struct DrawGroup {
  uint32_t arrived;  // at meetings, by all blocks; zero at the launch
  uint32_t listed[kHistograms];
  uint64_t best[2][kMaxGroup];
  uint64_t masses[kHistograms][kDrawBins];
  uint32_t counts[kHistograms][kDrawBins];
  float list[kListed];
  uint64_t segments[kDrawThreads];
  uint32_t ties[kDrawThreads];
};
static_assert(sizeof(DrawGroup) == kDrawGroupBytes);

// A block's place in its group, in shared memory.
struct Team {
  DrawGroup* group;
  int blocks, index;
  int first, end;     // this block's tokens
  uint32_t meetings;  // so far

  __device__ __forceinline__ bool alone() const { return blocks == 1; }

  // Waits for the other blocks; what they wrote before can then be read with __ldcg.
  __device__ __forceinline__ void meet() {
    __syncthreads();
    if (threadIdx.x == 0) {
      const uint32_t expected = ++meetings * static_cast<uint32_t>(blocks);
      __threadfence();
      atomicAdd(&group->arrived, 1u);
      while (*static_cast<volatile uint32_t*>(&group->arrived) < expected) __nanosleep(20);
      __threadfence();
    }
    __syncthreads();
    clear(static_cast<int>((meetings + 1) % kHistograms));
  }

  // Clears one histogram, all blocks together.
  __device__ __forceinline__ void clear(int which) const {
    for (int bin = index * kDrawThreads + static_cast<int>(threadIdx.x); bin < kDrawBins; bin += blocks * kDrawThreads) {
      group->counts[which][bin] = 0;
      group->masses[which][bin] = 0;
    }
    if (index == 0 && threadIdx.x == 0) group->listed[which] = 0;
  }
};

// Makes `team` the calling block's, of `p`'s group for `request`. Every block owns whole segments of `segment` tokens.
__device__ __forceinline__ void join_group(Team& team, const TreeAcceptSampledParams& p, int request, int segment) {
  if (threadIdx.x == 0) {
    const int index = static_cast<int>(blockIdx.x) % p.blocks;
    const int segments = (p.vocab + segment - 1) / segment;
    const int share = (segments + p.blocks - 1) / p.blocks * segment;
    const int first = min(index * share, p.vocab);
    team = {static_cast<DrawGroup*>(p.groups) + request, p.blocks, index, first, min(first + share, p.vocab), 0};
  }
  __syncthreads();
  if (!team.alone()) team.clear(1);  // for meeting 1, the first that a histogram can have
}

}  // namespace treeverify
