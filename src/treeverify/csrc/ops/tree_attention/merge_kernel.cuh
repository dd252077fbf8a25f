// Joins the partial results of items that several CTAs of the portable kernel shared, in fp32, in a fixed order.
//
// An entry (portable_schedule.cuh) names the partials of one item. An item is cut into *parts* of 64 float4 of the
// accumulator in fragment order (portable_kernel.cuh); the blocks share all parts of all entries evenly, whatever the
// number of entries turns out to be. In a block, thread (x, y) of 64 x 4 sums float4 x over partials y, y + 4, ...; the
// four sums are then joined in order, so the result does not depend on timing.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cuda_bf16.h>

#include "ops/tree_attention/portable_kernel.cuh"

namespace treeverify {

constexpr int kMergeColumns = 64;
constexpr int kMergeGroups = 4;
constexpr int kMergeBatch = 8;  // partials whose loads are in flight together

// Unnormalised sums of two rows, r and r + 1: values as in a fragment, maxima (base 2) and sums of weights.
struct RunningPair {
  float value[4] = {0.f, 0.f, 0.f, 0.f};
  float maximum[2] = {-FLT_MAX, -FLT_MAX};
  float sum[2] = {0.f, 0.f};

  // `stats`: maximum and sum of row r, then of row r + 1.
  __device__ __forceinline__ void add(const float4& values, const float4& stats) {
    const float top[2] = {fmaxf(maximum[0], stats.x), fmaxf(maximum[1], stats.z)};
    const float old_factor[2] = {exp2_approx(maximum[0] - top[0]), exp2_approx(maximum[1] - top[1])};
    const float new_factor[2] = {exp2_approx(stats.x - top[0]), exp2_approx(stats.z - top[1])};
    value[0] = value[0] * old_factor[0] + values.x * new_factor[0];
    value[1] = value[1] * old_factor[1] + values.y * new_factor[1];
    value[2] = value[2] * old_factor[0] + values.z * new_factor[0];
    value[3] = value[3] * old_factor[1] + values.w * new_factor[1];
    sum[0] = sum[0] * old_factor[0] + stats.y * new_factor[0];
    sum[1] = sum[1] * old_factor[1] + stats.w * new_factor[1];
    maximum[0] = top[0];
    maximum[1] = top[1];
  }
};

struct MergeShared {
  float4 values[kMergeGroups - 1][kMergeColumns];
  float4 stats[kMergeGroups - 1][kMergeColumns];
  MergeEntry active[kThreads];
  int index[kThreads];
  int warp_counts[kThreads / 32];
};

// Lists, in order, the entries base .. base + 255 that have something to merge; returns how many.
__device__ __forceinline__ int list_active(const PortableArgs& args, int base, MergeShared& shared) {
  const int thread = threadIdx.x;
  const int lane = thread & 31;
  MergeEntry entry{0, 0, 0, 0};
  if (base + thread < args.entries) entry = args.merge[base + thread];
  const uint32_t votes = __ballot_sync(0xffffffffu, entry.count > 1);
  if (lane == 0) shared.warp_counts[thread >> 5] = __popc(votes);
  __syncthreads();
  int before = __popc(votes & ((1u << lane) - 1));
  int total = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    if (warp < thread >> 5) before += shared.warp_counts[warp];
    total += shared.warp_counts[warp];
  }
  if (entry.count > 1) {
    shared.active[before] = entry;
    shared.index[before] = base + thread;
  }
  __syncthreads();
  return total;
}

// Sums float4 `element` of an item over the partials of this thread's group.
__device__ __forceinline__ RunningPair sum_group(const PortableArgs& args, int tile_rows, const MergeEntry& entry,
                                                 int index, int element, int row) {
  const int stride = args.granule ? 1 : 2;
  const int next = args.granule ? entry.first : 2 * index;
  RunningPair pair;
  for (int begin = threadIdx.x / kMergeColumns; begin < entry.count; begin += kMergeGroups * kMergeBatch) {
    float4 values[kMergeBatch], stats[kMergeBatch];
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      const int partial = begin + i * kMergeGroups;
      values[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      stats[i] = make_float4(-FLT_MAX, 0.f, -FLT_MAX, 0.f);
      if (partial < entry.count) {
        const int64_t slot = partial == 0 ? entry.first : next + partial * stride;
        values[i] = __ldcg(reinterpret_cast<const float4*>(args.partials + slot * tile_rows * kLatent) + element);
        stats[i] = __ldcg(reinterpret_cast<const float4*>(args.stats + slot * tile_rows + row));
      }
    }
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) pair.add(values[i], stats[i]);
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

__global__ void __launch_bounds__(kThreads) smxx_bf16_tree_attention_merge(const __grid_constant__ PortableArgs args,
                                                                           int tile_rows) {
  __shared__ MergeShared shared;
  wait_for_previous_launch();
  const int x = threadIdx.x % kMergeColumns;
  const int y = threadIdx.x / kMergeColumns;
  const int row_blocks = tile_rows / 8;
  const int parts = tile_rows * kLatent / 4 / kMergeColumns;
  for (int base = 0; base < args.entries; base += kThreads) {
    const int work = list_active(args, base, shared) * parts;
    for (int unit = blockIdx.x; unit < work; unit += gridDim.x) {
      const int which = unit / parts;
      const MergeEntry entry = shared.active[which];
      const int element = (unit - which * parts) * kMergeColumns + x;
      const int lane = element & 31;
      const int block = element >> 5;  // (warp * 4 + m) * row_blocks + n
      const int stripe = block / row_blocks;
      const int row = 8 * (block - stripe * row_blocks) + 2 * (lane & 3);
      RunningPair pair = sum_group(args, tile_rows, entry, shared.index[which], element, row);
      if (y > 0) {
        shared.values[y - 1][x] = make_float4(pair.value[0], pair.value[1], pair.value[2], pair.value[3]);
        shared.stats[y - 1][x] = make_float4(pair.maximum[0], pair.sum[0], pair.maximum[1], pair.sum[1]);
      }
      __syncthreads();
      if (y == 0) {  // whole warps: 64 columns
        for (int group = 0; group < kMergeGroups - 1; ++group) pair.add(shared.values[group][x], shared.stats[group][x]);
        write_merged(args, entry, pair, row, stripe * 16 + (lane >> 2), stripe == 0 && lane < 4);
      }
      __syncthreads();
    }
    __syncthreads();
  }
}

}  // namespace treeverify
