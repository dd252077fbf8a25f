// The k largest of many distinct 64-bit keys, sorted, by one block. Key 0 is none; the high half is the value that ranks.
//
// A bound comes first: every thread knows the largest of its values, and the k-th largest of these has at least k keys at
// or above it, in most data only a few more. It need not be exact, so one warp bisects for it. The keys from the bound on
// are listed in any order, and each is put where the number of larger ones says. If they are too many for the list (ties,
// or all the large ones in few threads), a radix search over them finds the digits (8 bits each) that the k-th largest
// begins with, until what begins so is just what is wanted. As keys are distinct, nothing depends on the order in which
// threads come.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "ops/draft_topk/params.h"

namespace treeverify {

constexpr int kRankThreads = 256;
constexpr int kRankWarps = kRankThreads / 32;
constexpr int kListedKeys = 512;

struct RankShared {
  uint32_t tops[kRankThreads];  // the threads' largest values
  uint32_t histogram[256];
  uint64_t listed[kListedKeys];
  uint64_t sorted[kMaxRanks];
  uint64_t bound;
  int count;                  // keys from the bound on
  int digit, above, inside;  // the digit found, keys with larger digits, keys with it
};

template <class T>
__device__ __forceinline__ T larger(T a, T b) {
  return a > b ? a : b;
}

template <class T>
__device__ __forceinline__ T smaller(T a, T b) {
  return a < b ? a : b;
}

// One warp: a value that at least k of s.tops reach, few more if such a value was met; 0 if fewer than k are not 0.
__device__ __forceinline__ uint32_t find_bound(const RankShared& s, int k) {
  const int lane = static_cast<int>(threadIdx.x);
  uint32_t own[kRankWarps];
  uint32_t low = UINT32_MAX, high = 0;
  unsigned there = 0;
#pragma unroll
  for (int i = 0; i < kRankWarps; ++i) {
    own[i] = s.tops[32 * i + lane];
    if (own[i] != 0) low = smaller(low, own[i]);
    high = larger(high, own[i]);
    there += own[i] != 0;
  }
  if (static_cast<int>(__reduce_add_sync(0xffffffffu, there)) < k) return 0;
  low = __reduce_min_sync(0xffffffffu, low);
  high = __reduce_max_sync(0xffffffffu, high);
  while (low < high) {  // at least k reach `low`, fewer reach `high` + 1
    const uint32_t middle = high - (high - low) / 2;
    unsigned reach = 0;
#pragma unroll
    for (int i = 0; i < kRankWarps; ++i) reach += own[i] >= middle;
    const int count = static_cast<int>(__reduce_add_sync(0xffffffffu, reach));
    if (count >= k) {
      low = middle;
    } else {
      high = middle - 1;
    }
    if (count >= k && count <= k + k / 4 + 4) break;
  }
  return low;
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

// The bound above which there are just k of the more than k keys that reach `bound`.
template <class Above>
__device__ __forceinline__ uint64_t narrow_bound(RankShared& s, const Above& above, uint64_t bound, int k) {
  uint64_t prefix = 0, mask = 0;
  int missing = k;
  for (int shift = 56; shift >= 0; shift -= 8) {
    s.histogram[threadIdx.x] = 0;
    __syncthreads();
    above(bound, [&](uint64_t key) {
      if ((key & mask) == prefix) atomicAdd(&s.histogram[(key >> shift) & 255], 1u);
    });
    __syncthreads();
    if (threadIdx.x < 32) find_digit(s, missing);
    __syncthreads();
    prefix |= static_cast<uint64_t>(s.digit) << shift;
    mask |= uint64_t{255} << shift;
    missing -= s.above;
    if (missing == s.inside) break;
  }
  return larger(prefix, bound);
}

// Lists the keys from `bound` on, as many as there is room for; s.count is the number of all.
template <class Above>
__device__ __forceinline__ void list_keys(RankShared& s, const Above& above, uint64_t bound) {
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  above(bound, [&](uint64_t key) {
    const int at = atomicAdd(&s.count, 1);
    if (at < kListedKeys) s.listed[at] = key;
  });
  __syncthreads();
}

// Fills s.sorted[0 .. k-1], largest first, 0 where there are too few. `top` is the largest value of the calling thread, 0
// if it has no key; `above(bound, use)` calls use(key) for its keys from `bound` (not 0) on. All threads must call; the
// result is there for all of them.
template <class Above>
__device__ __forceinline__ void rank_keys(RankShared& s, uint32_t top, const Above& above, int k) {
  const int thread = static_cast<int>(threadIdx.x);
  s.tops[thread] = top;
  s.sorted[thread] = 0;
  __syncthreads();
  if (thread < 32) {
    const uint32_t value = find_bound(s, k);
    if (thread == 0) s.bound = larger(static_cast<uint64_t>(value) << 32, uint64_t{1});
  }
  __syncthreads();
  list_keys(s, above, s.bound);
  if (s.count > kListedKeys) list_keys(s, above, narrow_bound(s, above, s.bound, k));
  const int count = smaller(s.count, kListedKeys);
  for (int own = thread; own < count; own += kRankThreads) {
    const uint64_t key = s.listed[own];
    int before = 0;
#pragma unroll 4
    for (int other = 0; other < count; ++other) before += s.listed[other] > key;
    if (before < k) s.sorted[before] = key;
  }
  __syncthreads();
}

}  // namespace treeverify
