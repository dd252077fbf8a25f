// Top-k with logsumexp, in two kernels: blocks rank tiles of kTileColumns columns, then one block per row merges them.
// Shards of a vocabulary are merged by the same second kernel.
//
// A key holds the ordered bits of a logit and the complement of its token id: distinct, and larger is better, also among
// equal logits. Sums are added in an order that the sizes fix, so results do not vary from run to run.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "device/order.cuh"
#include "ops/draft_topk/params.h"
#include "ops/draft_topk/rank_keys.cuh"

namespace treeverify {

constexpr int kTileItems = kTileColumns / kRankThreads;
constexpr uint64_t kTopBit = uint64_t{1} << 63;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// What exponents are relative to: the peak, or 0 if everything is -inf, as -inf - -inf is no number.
__device__ __forceinline__ float exponent_base(float peak) { return peak == -INFINITY ? 0.0f : peak; }

__device__ __forceinline__ uint64_t packed_stats(float peak, float sum) {
  return static_cast<uint64_t>(__float_as_uint(peak)) << 32 | __float_as_uint(sum);
}

template <class T>
__global__ void __launch_bounds__(kRankThreads) smxx_draft_topk_tile(const __grid_constant__ TopkTileParams p) {
  __shared__ RankShared s;
  __shared__ uint32_t peaks[kRankWarps];
  __shared__ float sums[kRankWarps];
  const int thread = static_cast<int>(threadIdx.x);
  const int rows = p.batch * p.depth;
  const int tile = static_cast<int>(blockIdx.x) / rows, row = static_cast<int>(blockIdx.x) % rows;
  const T* logits = static_cast<const T*>(p.logits) + row / p.depth * p.request_stride + row % p.depth * p.depth_stride;
  const int first = tile * kTileColumns + thread;  // this thread's columns: first, first + kRankThreads, ..
  uint32_t values[kTileItems];
  uint32_t peak = 0;
#pragma unroll
  for (int i = 0; i < kTileItems; ++i) {
    const int column = first + i * kRankThreads;
    values[i] = column < p.vocab ? ordered_bits(to_float(logits[column])) : 0;
    peak = larger(peak, values[i]);
  }
  peak = __reduce_max_sync(0xffffffffu, peak);
  if (thread % 32 == 0) peaks[thread / 32] = peak;
  __syncthreads();
  for (int warp = 0; warp < kRankWarps; ++warp) peak = larger(peak, peaks[warp]);
  const float base = exponent_base(from_ordered_bits(peak));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kTileItems; ++i) {
    if (values[i] != 0) sum += expf(from_ordered_bits(values[i]) - base);
  }
  for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (thread % 32 == 0) sums[thread / 32] = sum;

  rank_keys(s, [&](auto use) {
#pragma unroll
    for (int i = 0; i < kTileItems; ++i) {
      const uint32_t id = static_cast<uint32_t>(p.first_id + first + i * kRankThreads);
      use(values[i] == 0 ? 0 : static_cast<uint64_t>(values[i]) << 32 | ~id);
    }
  }, p.k);
  int64_t* packed = p.packed + (static_cast<int64_t>(tile) * rows + row) * (p.k + 1);
  if (thread < p.k) packed[thread] = static_cast<int64_t>(s.sorted[thread] ^ kTopBit);
  if (thread == 0) {
    sum = 0.0f;
    for (int warp = 0; warp < kRankWarps; ++warp) sum += sums[warp];
    packed[p.k] = static_cast<int64_t>(packed_stats(from_ordered_bits(peak), sum));
  }
}

// One warp: the peak and the sum over all parts of a row, in every lane.
__device__ __forceinline__ void merge_stats(const TopkMergeParams& p, int row, float& peak, float& sum) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t stride = static_cast<int64_t>(p.rows) * (p.k + 1);
  const int64_t* stats = p.parts + static_cast<int64_t>(row) * (p.k + 1) + p.k;
  uint32_t top = 0;
  for (int part = lane; part < p.count; part += 32) {
    top = larger(top, ordered_bits(__uint_as_float(static_cast<uint64_t>(stats[part * stride]) >> 32)));
  }
  peak = from_ordered_bits(__reduce_max_sync(0xffffffffu, top));
  const float base = exponent_base(peak);
  sum = 0.0f;
  for (int part = lane; part < p.count; part += 32) {
    const uint64_t own = static_cast<uint64_t>(stats[part * stride]);
    sum += __uint_as_float(static_cast<uint32_t>(own)) * expf(__uint_as_float(own >> 32) - base);
  }
  for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
}

__global__ void __launch_bounds__(kRankThreads) smxx_draft_topk_merge(const __grid_constant__ TopkMergeParams p) {
  __shared__ RankShared s;
  const int thread = static_cast<int>(threadIdx.x);
  const int row = static_cast<int>(blockIdx.x);
  const int entries = p.count * p.k;
  rank_keys(s, [&](auto use) {
    for (int i = thread; i < entries; i += kRankThreads) {
      const int64_t part = static_cast<int64_t>(i / p.k) * p.rows + row;
      use(static_cast<uint64_t>(p.parts[part * (p.k + 1) + i % p.k]) ^ kTopBit);
    }
  }, p.k);
  float peak, sum;
  merge_stats(p, row, peak, sum);
  if (p.packed != nullptr) {
    int64_t* packed = p.packed + static_cast<int64_t>(row) * (p.k + 1);
    if (thread < p.k) packed[thread] = static_cast<int64_t>(s.sorted[thread] ^ kTopBit);
    if (thread == 0) packed[p.k] = static_cast<int64_t>(packed_stats(peak, sum));
    return;
  }
  if (thread >= p.k) return;
  const uint64_t key = s.sorted[thread];
  const int64_t at = static_cast<int64_t>(row) * p.k + thread;
  const bool drawable = key != 0 && peak != -INFINITY;
  p.log_probs[at] = drawable ? from_ordered_bits(key >> 32) - (peak + logf(sum)) : -INFINITY;
  p.token_ids[at] = key != 0 ? static_cast<int64_t>(~static_cast<uint32_t>(key)) : 0;
}

}  // namespace treeverify
