// Joins the partial results of items that several CTAs of the portable kernel shared, in fp32, in a fixed order.
//
// An entry (portable_schedule.cuh) names the partials of one item. An item is cut into *parts* of 32 float4 of the
// accumulator in fragment order (portable_kernel.cuh). Few partials: every warp takes parts of its own and sums all
// partials. Many: a block takes a part, warp y sums partials y, y + 8, ..; the eight sums are then joined in order. Either
// way the result does not depend on timing.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cuda_bf16.h>

#include "ops/tree_attention/portable_kernel.cuh"

namespace treeverify {

constexpr int kMergeColumns = 32;
constexpr int kMergeGroups = 8;
constexpr int kMergeBatch = 6;  // partials whose loads are in flight together
constexpr int kMergeFew = 2 * kMergeBatch;

// Unnormalised sums of two rows, r and r + 1: values as in a fragment, maxima (base 2) and sums of weights.
struct RunningPair {
  float value[4] = {0.f, 0.f, 0.f, 0.f};
  float maximum[2] = {-FLT_MAX, -FLT_MAX};
  float sum[2] = {0.f, 0.f};

  // Adds the first `count` of N partials. `stats`: maximum and sum of row r, then of row r + 1.
  template <int N>
  __device__ __forceinline__ void add(const float4 (&values)[N], const float4 (&stats)[N], int count) {
    float top[2] = {maximum[0], maximum[1]};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) {
        top[0] = fmaxf(top[0], stats[i].x);
        top[1] = fmaxf(top[1], stats[i].z);
      }
    }
    rescale(exp2_approx(maximum[0] - top[0]), exp2_approx(maximum[1] - top[1]));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) {
        const float factor[2] = {exp2_approx(stats[i].x - top[0]), exp2_approx(stats[i].z - top[1])};
        value[0] += values[i].x * factor[0];
        value[1] += values[i].y * factor[1];
        value[2] += values[i].z * factor[0];
        value[3] += values[i].w * factor[1];
        sum[0] += stats[i].y * factor[0];
        sum[1] += stats[i].w * factor[1];
      }
    }
    maximum[0] = top[0];
    maximum[1] = top[1];
  }

 private:
  __device__ __forceinline__ void rescale(float even, float odd) {
    value[0] *= even;
    value[1] *= odd;
    value[2] *= even;
    value[3] *= odd;
    sum[0] *= even;
    sum[1] *= odd;
  }
};

struct MergeShared {
  float4 values[kMergeGroups][kMergeColumns];
  float4 stats[kMergeGroups][kMergeColumns];
  MergeEntry active[kThreads];
  int index[kThreads];
  int warp_counts[kThreads / 32];  // those with few partials in the low half, those with many in the high half
};

// Lists, in order, the entries base .. base + 255 that have something to merge: first those with many partials, then those
// with few. Returns their numbers, few in the low half, many in the high half.
__device__ __forceinline__ int list_active(const PortableArgs& args, int base, MergeShared& shared) {
  const int thread = threadIdx.x;
  const int lane = thread & 31;
  MergeEntry entry{0, 0, 0, 0};
  if (base + thread < args.entries) entry = args.merge[base + thread];
  const bool few = entry.count > 1 && entry.count <= kMergeFew, many = entry.count > kMergeFew;
  const uint32_t below = (1u << lane) - 1;
  const uint32_t few_votes = __ballot_sync(0xffffffffu, few), many_votes = __ballot_sync(0xffffffffu, many);
  if (lane == 0) shared.warp_counts[thread >> 5] = __popc(few_votes) + (__popc(many_votes) << 16);
  __syncthreads();
  int before = __popc(few_votes & below) + (__popc(many_votes & below) << 16);
  int total = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    const int counts = shared.warp_counts[warp];
    if (warp < thread >> 5) before += counts;
    total += counts;
  }
  if (few || many) {
    const int place = many ? before >> 16 : (total >> 16) + (before & 0xffff);
    shared.active[place] = entry;
    shared.index[place] = base + thread;
  }
  __syncthreads();
  return total;
}

// Sums float4 `element` of an item over its partials `begin`, `begin` + `step`, ..
__device__ __forceinline__ RunningPair sum_partials(const PortableArgs& args, int tile_rows, const MergeEntry& entry,
                                                    int index, int element, int row, int begin, int step) {
  const int stride = args.granule ? 1 : 2;
  const int next = args.granule ? entry.first : 2 * index;
  RunningPair pair;
  for (; begin < entry.count; begin += step * kMergeBatch) {
    float4 values[kMergeBatch], stats[kMergeBatch];
    const int count = (entry.count - begin + step - 1) / step;
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      if (i < count) {  // the same for a whole warp
        const int partial = begin + i * step;
        const int64_t slot = partial == 0 ? entry.first : next + partial * stride;
        values[i] = __ldcg(reinterpret_cast<const float4*>(args.partials + slot * tile_rows * kLatent) + element);
        stats[i] = __ldcg(reinterpret_cast<const float4*>(args.stats + slot * tile_rows + row));
      }
    }
    pair.add(values, stats, count);
  }
  return pair;
}

// Normalises and writes rows `row` and `row` + 1 at the columns of fragment element (warp, m, lane).
__device__ __forceinline__ void write_merged(const PortableArgs& args, const MergeEntry& entry, const RunningPair& pair,
                                             int row, int column, bool with_lse) {
  const TreeAttentionParams& p = args.p;
  const int rows = min(args.useful_rows, p.nodes * p.heads - entry.row_tile * args.useful_rows);
  __nv_bfloat16* targets[2] = {nullptr, nullptr};
  float scaled[4];
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const float sum = pair.sum[odd];
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    scaled[odd] = pair.value[odd] * inverse;
    scaled[odd + 2] = pair.value[odd + 2] * inverse;
    if (row + odd >= rows) continue;
    const RowPlace place = place_row(p, entry.request, entry.row_tile * args.useful_rows + row + odd);
    targets[odd] = static_cast<__nv_bfloat16*>(p.out) + place.token * p.out_token_stride + place.head * p.out_head_stride;
    if (with_lse) {
      p.lse[place.token * p.heads + place.head] = sum == 0.f ? -INFINITY : (pair.maximum[odd] + log2f(sum)) * kLn2;
    }
  }
  store_fragment(targets[0], targets[1], column, scaled);
}

// Where a float4 of an item belongs.
struct MergePlace {
  __device__ __forceinline__ MergePlace(int part, int row_blocks) {
    const int lane = threadIdx.x & 31;
    stripe = part / row_blocks;  // part: (warp * 4 + m) * row_blocks + n
    row = 8 * (part - stripe * row_blocks) + 2 * (lane & 3);
    column = stripe * 16 + (lane >> 2);
    element = part * kMergeColumns + lane;
    with_lse = stripe == 0 && lane < 4;
  }
  int stripe, row, column, element;
  bool with_lse;
};

__global__ void __launch_bounds__(kThreads) smxx_bf16_tree_attention_merge(const __grid_constant__ PortableArgs args,
                                                                           int tile_rows) {
  __shared__ MergeShared shared;
  wait_for_previous_launch();
  const int x = threadIdx.x % kMergeColumns;
  const int y = threadIdx.x / kMergeColumns;
  const int row_blocks = tile_rows / 8;
  const int parts = tile_rows * kLatent / 4 / kMergeColumns;
  for (int base = 0; base < args.entries; base += kThreads) {
    const int total = list_active(args, base, shared);
    const int many = total >> 16, few = total & 0xffff;
    for (int unit = blockIdx.x; unit < many * parts; unit += gridDim.x) {
      const int which = unit / parts;
      const MergeEntry entry = shared.active[which];
      const MergePlace place(unit - which * parts, row_blocks);
      const RunningPair own =
          sum_partials(args, tile_rows, entry, shared.index[which], place.element, place.row, y, kMergeGroups);
      shared.values[y][x] = make_float4(own.value[0], own.value[1], own.value[2], own.value[3]);
      shared.stats[y][x] = make_float4(own.maximum[0], own.sum[0], own.maximum[1], own.sum[1]);
      __syncthreads();
      if (y == 0) {  // a whole warp
        float4 values[kMergeGroups], stats[kMergeGroups];
#pragma unroll
        for (int group = 0; group < kMergeGroups; ++group) {
          values[group] = shared.values[group][x];
          stats[group] = shared.stats[group][x];
        }
        RunningPair pair;
        pair.add(values, stats, kMergeGroups);
        write_merged(args, entry, pair, place.row, place.column, place.with_lse);
      }
      __syncthreads();
    }
    // Neighbouring blocks take neighbouring parts.
    for (int unit = blockIdx.x + y * gridDim.x; unit < few * parts; unit += kMergeGroups * gridDim.x) {
      const int which = unit / parts;
      const MergeEntry entry = shared.active[many + which];
      const MergePlace place(unit - which * parts, row_blocks);
      const RunningPair pair =
          sum_partials(args, tile_rows, entry, shared.index[many + which], place.element, place.row, 0, 1);
      write_merged(args, entry, pair, place.row, place.column, place.with_lse);
    }
    __syncthreads();
  }
}

}  // namespace treeverify
