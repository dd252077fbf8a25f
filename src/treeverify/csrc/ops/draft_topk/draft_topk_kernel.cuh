// Top-k with logsumexp, in two kernels: blocks rank tiles of kTileColumns columns, then one block per row merges them.
// Shards of a vocabulary are merged by the same second kernel.
//
// A key holds the ordered bits of a logit and the complement of its token id: distinct, and larger is better, also among
// equal logits. Sums are added in an order that the sizes fix, so results do not vary from run to run.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "device/order.cuh"
#include "ops/draft_topk/params.h"
#include "ops/draft_topk/rank_keys.cuh"

namespace treeverify {

constexpr int kTileItems = kTileColumns / kRankThreads;
constexpr uint64_t kTopBit = uint64_t{1} << 63;

// What exponents are relative to: the peak, or 0 if everything is -inf, as -inf - -inf is no number.
__device__ __forceinline__ float exponent_base(float peak) { return peak == -INFINITY ? 0.0f : peak; }

__device__ __forceinline__ uint64_t packed_stats(float peak, float sum) {
  return static_cast<uint64_t>(__float_as_uint(peak)) << 32 | __float_as_uint(sum);
}

// The columns of a tile that one thread has, 16 bytes at a time. `Bits` holds a logit: uint32_t one of float32, uint16_t
// of bfloat16.
template <class Bits>
struct TileColumns {
  static constexpr int kPerWord = sizeof(uint32_t) / sizeof(Bits);
  static constexpr int kPerLoad = 4 * kPerWord;
  static constexpr int kLoads = kTileColumns / kRankThreads / kPerLoad;
  // Blocks per multiprocessor: some load while others rank; the registers bound them.
  static constexpr int kBlocks = kPerWord == 1 ? 4 : 6;

  const Bits* tile;
  int columns;  // that the tile has

  static __device__ __forceinline__ int first(int load) {
    return (load * kRankThreads + static_cast<int>(threadIdx.x)) * kPerLoad;
  }

  static __device__ __forceinline__ float value(const uint4& words, int i) {
    const int at = i / kPerWord;
    const uint32_t word = at == 0 ? words.x : at == 1 ? words.y : at == 2 ? words.z : words.w;
    if constexpr (kPerWord == 1) return __uint_as_float(word);
    return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }

  __device__ __forceinline__ bool aligned() const { return reinterpret_cast<uintptr_t>(tile) % sizeof(uint4) == 0; }

  // All of the thread's columns, at once if they are whole loads.
  __device__ __forceinline__ void read_all(uint4* words) const {
    if (aligned() && columns == kTileColumns) {
#pragma unroll
      for (int load = 0; load < kLoads; ++load) words[load] = *reinterpret_cast<const uint4*>(tile + first(load));
      return;
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      words[load] = read(load);
    }
  }

  // -inf where the tile has no column.
  __device__ __forceinline__ uint4 read(int load) const {
    const int begin = first(load);
    if (aligned() && begin + kPerLoad <= columns) return *reinterpret_cast<const uint4*>(tile + begin);
    return {word_at(begin), word_at(begin + kPerWord), word_at(begin + 2 * kPerWord), word_at(begin + 3 * kPerWord)};
  }

 private:
  __device__ __forceinline__ uint32_t word_at(int column) const {
    constexpr uint32_t kMinusInfinity = 0xff800000u >> (32 - 8 * sizeof(Bits));
    const uint32_t low = column < columns ? tile[column] : kMinusInfinity;
    if constexpr (kPerWord == 1) return low;
    return low | (column + 1 < columns ? tile[column + 1] : kMinusInfinity) << 16;
  }
};

template <class Bits>
__global__ void __launch_bounds__(kRankThreads, TileColumns<Bits>::kBlocks)
    smxx_draft_topk_tile(const __grid_constant__ TopkTileParams p) {
  using Columns = TileColumns<Bits>;
  __shared__ RankShared s;
  __shared__ float sums[kRankWarps];
  const int thread = static_cast<int>(threadIdx.x);
  const int rows = p.batch * p.depth;
  const int tile = static_cast<int>(blockIdx.x) / rows, row = static_cast<int>(blockIdx.x) % rows;
  const Bits* logits = static_cast<const Bits*>(p.logits) + row / p.depth * p.request_stride + row % p.depth * p.depth_stride;
  const int before = tile * kTileColumns;
  const Columns mine{logits + before, smaller(kTileColumns, p.vocab - before)};
  uint4 words[Columns::kLoads];
  mine.read_all(words);
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kTileItems; ++i) {  // a NaN is passed over: the sum has it
    top = fmaxf(top, Columns::value(words[i / Columns::kPerLoad], i % Columns::kPerLoad));
  }
  const float own_base = exponent_base(top);
  float even = 0.0f, odd = 0.0f;
#pragma unroll 1
  for (int load = 0; load < Columns::kLoads; ++load) {  // the cache has them; held in registers, they would cost blocks
    const uint4 four = mine.read(load);
#pragma unroll
    for (int i = 0; i < Columns::kPerLoad; i += 2) {
      even += expf(Columns::value(four, i) - own_base);
      odd += expf(Columns::value(four, i + 1) - own_base);
    }
  }

  rank_keys(s, ordered_bits(top), [&](uint64_t bound, auto use) {
    const float least = from_ordered_bits(static_cast<uint32_t>(bound >> 32));
    if (!(top >= least)) return;
#pragma unroll 1
    for (int load = 0; load < Columns::kLoads; ++load) {
      const uint4 four = mine.read(load);
#pragma unroll
      for (int i = 0; i < Columns::kPerLoad; ++i) {
        const float value = Columns::value(four, i);
        const int column = Columns::first(load) + i;
        if (!(value >= least) || column >= mine.columns) continue;
        const uint32_t id = static_cast<uint32_t>(p.first_id + before + column);
        const uint64_t key = static_cast<uint64_t>(ordered_bits(value)) << 32 | ~id;
        if (key >= bound) use(key);
      }
    }
  }, p.k);

  uint32_t highest = s.tops[thread % 32];
#pragma unroll
  for (int warp = 1; warp < kRankWarps; ++warp) highest = larger(highest, s.tops[32 * warp + thread % 32]);
  const float peak = from_ordered_bits(__reduce_max_sync(0xffffffffu, highest));
  float sum = (even + odd) * expf(top - exponent_base(peak));
  for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (thread % 32 == 0) sums[thread / 32] = sum;
  __syncthreads();
  int64_t* packed = p.packed + (static_cast<int64_t>(tile) * rows + row) * (p.k + 1);
  if (thread < p.k) packed[thread] = static_cast<int64_t>(s.sorted[thread] ^ kTopBit);
  if (thread == 0) {
    sum = 0.0f;
    for (int warp = 0; warp < kRankWarps; ++warp) sum += sums[warp];
    packed[p.k] = static_cast<int64_t>(packed_stats(peak, sum));
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
  // Entry by entry over all parts: the large keys, first in every part, come to different threads.
  const auto each = [&](auto use) {
    for (int i = thread; i < entries; i += kRankThreads) {
      const int64_t part = static_cast<int64_t>(i % p.count) * p.rows + row;
      use(static_cast<uint64_t>(p.parts[part * (p.k + 1) + i / p.count]) ^ kTopBit);
    }
  };
  uint32_t top = 0;
  each([&](uint64_t key) { top = larger(top, static_cast<uint32_t>(key >> 32)); });
  const auto above = [&](uint64_t bound, auto use) {
    each([&](uint64_t key) {
      if (key >= bound) use(key);
    });
  };
  rank_keys(s, top, above, p.k);
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
  const float lse = peak + logf(sum);  // NaN if a logit is NaN or +inf, -inf if all are -inf
  const float log_prob = from_ordered_bits(static_cast<uint32_t>(key >> 32)) - lse;
  p.log_probs[at] = lse != lse ? lse : key != 0 && lse != -INFINITY ? log_prob : -INFINITY;
  p.token_ids[at] = key != 0 ? static_cast<int64_t>(~static_cast<uint32_t>(key)) : 0;
}

}  // namespace treeverify
