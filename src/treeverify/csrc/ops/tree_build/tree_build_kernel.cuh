// Best-first search over ranked candidates: one warp builds one request's tree.
//
// The frontier holds the nodes that may be taken next, at most `budget` of them: taking a node replaces it by its next
// sibling and adds its rank-0 child. Each step all lanes look through the frontier (lane l at entries l, l + 32, ..) for
// the highest score; among equal scores the lexicographically smallest rank tuple wins. Tuples are compared as numbers,
// a byte per depth, the root's child first. Bytes beyond a node's depth are 0; that decides nothing, as no frontier node
// is another's ancestor and so two tuples differ within the depth of both.
//
// Scores are float32 sums from the root, each rounded once: the numbers of tree.build, bit for bit.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "device/order.cuh"
#include "ops/tree_build/params.h"

namespace treeverify {

constexpr int kRankWords = kMaxDepth / 4;

struct BuildShared {
  float log_probs[kMaxDepth * kMaxCandidates];  // [depth, columns]
  float node_scores[kMaxBudget + 1];            // by node number, as the next two
  int32_t node_parents[kMaxBudget + 1];
  int32_t node_places[kMaxBudget + 1];  // among the candidates: level * k + rank
  float scores[kMaxBudget];                     // of the frontier; -inf: free
  int32_t parents[kMaxBudget];
  int32_t levels[kMaxBudget];  // depth - 1
  uint32_t ranks[kMaxBudget][kRankWords];
};

__device__ __forceinline__ int rank_shift(int level) { return 24 - 8 * (level % 4); }

// Does frontier entry `a` go before `b`, given equal scores?
__device__ __forceinline__ bool smaller_ranks(const BuildShared& s, int a, int b) {
  for (int word = 0; word < kRankWords; ++word) {
    if (s.ranks[a][word] != s.ranks[b][word]) return s.ranks[a][word] < s.ranks[b][word];
  }
  return false;
}

// The entry to take next, the same in all lanes; -1 if the frontier is empty.
__device__ __forceinline__ int best_entry(const BuildShared& s, int used, int lane) {
  int best = -1;
  uint32_t key = ordered_bits(-INFINITY);
  for (int entry = lane; entry < used; entry += 32) {
    const uint32_t other = ordered_bits(s.scores[entry]);
    if (other > key || (other == key && best >= 0 && smaller_ranks(s, entry, best))) {
      best = entry;
      key = other;
    }
  }
  const uint32_t top = __reduce_max_sync(0xffffffffu, key);
  bool tied = best >= 0 && key == top;
  uint32_t lanes = __ballot_sync(0xffffffffu, tied);
  for (int word = 0; word < kRankWords && __popc(lanes) > 1; ++word) {
    const uint32_t ranks = tied ? s.ranks[best][word] : 0xffffffffu;
    const uint32_t smallest = __reduce_min_sync(0xffffffffu, ranks);
    tied = tied && ranks == smallest;
    lanes = __ballot_sync(0xffffffffu, tied);
  }
  return lanes == 0 ? -1 : __shfl_sync(0xffffffffu, best, __ffs(static_cast<int>(lanes)) - 1);
}

__global__ void __launch_bounds__(32) smxx_tree_build(const __grid_constant__ TreeBuildParams p) {
  __shared__ BuildShared s;
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t request = blockIdx.x;
  const int64_t first = request * p.width;
  const int64_t candidates = request * p.depth * p.k;
  const int columns = min(p.k, p.width - 1);  // rank r needs r earlier siblings, so r < budget
  for (int i = lane; i < p.depth * columns; i += 32) {
    s.log_probs[i] = p.log_probs[candidates + i / columns * p.k + i % columns];
  }
  for (int word = lane; word < kRankWords; word += 32) s.ranks[0][word] = 0;
  __syncwarp();
  int used = p.depth > 0 && columns > 0 ? 1 : 0;
  if (lane == 0) {
    s.node_scores[0] = 0.0f;
    if (used == 1) {
      s.scores[0] = s.log_probs[0] > -INFINITY ? s.log_probs[0] : -INFINITY;  // a NaN is not drafted
      s.parents[0] = 0;
      s.levels[0] = 0;
    }
  }
  __syncwarp();

  int width = 1;
  for (; width < p.width; ++width) {
    const int entry = best_entry(s, used, lane);
    if (entry < 0) break;
    const int level = s.levels[entry], parent = s.parents[entry];
    const int rank = (s.ranks[entry][level / 4] >> rank_shift(level)) & 255;
    const float score = s.scores[entry];
    float sibling = -INFINITY, child = -INFINITY;
    if (rank + 1 < columns) sibling = __fadd_rn(s.node_scores[parent], s.log_probs[level * columns + rank + 1]);
    if (level + 1 < p.depth) child = __fadd_rn(score, s.log_probs[(level + 1) * columns]);
    const bool has_sibling = sibling > -INFINITY, has_child = child > -INFINITY;
    const int child_entry = has_sibling ? used : entry;
    const bool room = child_entry < kMaxBudget;  // without it this was the last node
    __syncwarp();  // all lanes have read the entry
    if (lane < kRankWords) {
      const uint32_t ranks = s.ranks[entry][lane];
      if (has_child && room) s.ranks[child_entry][lane] = ranks;
      if (has_sibling && lane == level / 4) s.ranks[entry][lane] = ranks + (1u << rank_shift(level));
    }
    if (lane == 0) {
      s.node_scores[width] = score;
      s.node_parents[width] = parent;
      s.node_places[width] = level * p.k + rank;
      s.scores[entry] = sibling;
      if (has_child && room) {
        s.scores[child_entry] = child;
        s.parents[child_entry] = width;
        s.levels[child_entry] = level + 1;
      }
    }
    if (has_sibling && has_child && room) ++used;
    __syncwarp();
  }

  const int64_t root = p.roots[request];
  for (int node = lane; node < p.width; node += 32) {
    const bool drafted = node > 0 && node < width;
    const int place = drafted ? s.node_places[node] : 0;
    p.tokens[first + node] = drafted ? p.token_ids[candidates + place] : root;
    p.parents[first + node] = drafted ? s.node_parents[node] : -1;
    p.depths[first + node] = drafted ? place / p.k + 1 : 0;
    p.scores[first + node] = node < width ? s.node_scores[node] : -INFINITY;
  }
  if (lane == 0) p.widths[request] = width;
}

}  // namespace treeverify
