// The k largest of many distinct 64-bit keys, sorted, by one block. Key 0 is none.
//
// A bound comes first: the threads form at least k groups, each has a largest key, and the smallest of these has at least
// k keys at or above it. A radix search over the keys from the bound on then finds the digits (8 bits each) that the
// k-th largest begins with, until what begins so is just what is wanted; the bound keeps its histogram out of crowds.
// The keys found are gathered in any order, and each is put where the number of larger ones says. As keys are distinct,
// nothing depends on the order in which threads come.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "ops/draft_topk/params.h"

namespace treeverify {

constexpr int kRankThreads = 256;
constexpr int kRankWarps = kRankThreads / 32;

struct RankShared {
  uint32_t histogram[256];
  uint64_t found[kMaxRanks];
  uint64_t sorted[kMaxRanks];
  uint64_t bounds[kRankWarps];
  int counts[kRankWarps];
  int digit, above, inside;  // the digit found, keys with larger digits, keys with it
  int gathered;
};

template <class T>
__device__ __forceinline__ T larger(T a, T b) {
  return a > b ? a : b;
}

template <class T>
__device__ __forceinline__ T smaller(T a, T b) {
  return a < b ? a : b;
}

// Lower bound on the k-th largest key (1 if there may be fewer), and the number of keys to `total`.
template <class Items>
__device__ __forceinline__ uint64_t rank_bound(RankShared& s, const Items& items, int k, int& total) {
  const int thread = static_cast<int>(threadIdx.x);
  uint64_t top = 0;
  int count = 0;
  items([&](uint64_t key) {
    top = larger(top, key);
    count += key != 0;
  });
  for (int distance = 1; distance < 32 && kRankThreads / (2 * distance) >= k; distance *= 2) {
    top = larger(top, __shfl_xor_sync(0xffffffffu, top, distance));
  }
  for (int distance = 1; distance < 32; distance *= 2) {
    top = smaller(top, __shfl_xor_sync(0xffffffffu, top, distance));
  }
  count = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(count)));
  if (thread % 32 == 0) {
    s.bounds[thread / 32] = top;
    s.counts[thread / 32] = count;
  }
  __syncthreads();
  total = 0;
  for (int warp = 0; warp < kRankWarps; ++warp) {
    top = smaller(top, s.bounds[warp]);
    total += s.counts[warp];
  }
  return larger(top, uint64_t{1});
}

// One warp: the digit at which the histogram, from its top, reaches `wanted`.
__device__ __forceinline__ void find_digit(RankShared& s, int wanted) {
  const int lane = static_cast<int>(threadIdx.x);
  int own = 0;
  for (int i = 0; i < 8; ++i) own += static_cast<int>(s.histogram[255 - 8 * lane - i]);
  int until = own;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, until, distance);
    if (lane >= distance) until += other;
  }
  int above = until - own;
  if (above >= wanted || until < wanted) return;
  for (int digit = 255 - 8 * lane;; --digit) {
    const int inside = static_cast<int>(s.histogram[digit]);
    if (above + inside >= wanted) {
      s.digit = digit;
      s.above = above;
      s.inside = inside;
      return;
    }
    above += inside;
  }
}

// Fills s.sorted[0 .. k-1], largest first, 0 where there are too few. `items(f)` calls f(key) for each key of the calling
// thread, the same ones every time. All threads must call; the result is there for all of them.
template <class Items>
__device__ __forceinline__ void rank_keys(RankShared& s, const Items& items, int k) {
  const int thread = static_cast<int>(threadIdx.x);
  int total;
  const uint64_t bound = rank_bound(s, items, k, total);
  const int wanted = smaller(k, total);
  uint64_t prefix = 0, mask = 0;
  int missing = wanted;
  for (int shift = 56; missing > 0 && shift >= 0; shift -= 8) {
    s.histogram[thread] = 0;
    __syncthreads();
    items([&](uint64_t key) {
      if (key >= bound && (key & mask) == prefix) atomicAdd(&s.histogram[(key >> shift) & 255], 1u);
    });
    __syncthreads();
    if (thread < 32) find_digit(s, missing);
    __syncthreads();
    prefix |= static_cast<uint64_t>(s.digit) << shift;
    mask |= uint64_t{255} << shift;
    missing -= s.above;
    if (missing == s.inside) break;
  }
  if (thread == 0) s.gathered = 0;
  s.sorted[thread] = 0;
  __syncthreads();
  items([&](uint64_t key) {
    if (wanted > 0 && key >= bound && (key & mask) >= prefix) s.found[atomicAdd(&s.gathered, 1)] = key;
  });
  __syncthreads();
  if (thread < wanted) {
    int before = 0;
    for (int other = 0; other < wanted; ++other) before += s.found[other] > s.found[thread];
    s.sorted[before] = s.found[thread];
  }
  __syncthreads();
}

}  // namespace treeverify
