// Joins the partial results of items that several CTAs of the portable kernel shared, in fp32, in a fixed order.
//
// An entry (portable_schedule.cuh) names the partials of one item. An item is cut into *parts*, the 32 float4 of the
// accumulator in fragment order that hold 8 rows at 16 columns (portable_rows.cuh). 1, 2, 4 or 8 warps of a block share
// the partials of a part, as many as it takes to have few loads per warp: warp g of G sums partials g, g + G, .., then
// the sums are joined in order. So the result does not depend on timing.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cuda_bf16.h>

#include "ops/tree_attention/portable_kernel.cuh"

namespace treeverify {

constexpr int kWarps = kThreads / 32;
constexpr int kMergeBatch = 8;  // partials whose loads a warp has in flight together
constexpr int kMergeBlocksPerMultiprocessor = 3;

// How many of them a multiprocessor must hold at once: from sm_100 on, three would leave a register too few.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kMergeResident = 2;
#else
constexpr int kMergeResident = kMergeBlocksPerMultiprocessor;
#endif

// Unnormalised sums of a part. Lane l holds four values as in a fragment, of rows 2 (l % 4) and the next, and the maximum
// (base 2) and sum of weights of row l % 8.
struct PartSum {
  float value[4] = {0.f, 0.f, 0.f, 0.f};
  float maximum = -FLT_MAX, sum = 0.f;

  // Makes room for a maximum that may be larger. The same for all lanes of a row.
  __device__ __forceinline__ void raise(float top) {
    const float factor = exp2_approx(maximum - top);
    scale(factor);
    sum *= factor;
    maximum = top;
  }

  // Multiplies the values by a factor that lane l holds for row l % 8.
  __device__ __forceinline__ void scale(float factor) {
    const float2 pair = of_own_rows(factor, 0);
    value[0] *= pair.x;
    value[1] *= pair.y;
    value[2] *= pair.x;
    value[3] *= pair.y;
  }

  __device__ __forceinline__ void add(const float4& other, float2 factor) {
    value[0] += other.x * factor.x;
    value[1] += other.y * factor.y;
    value[2] += other.z * factor.x;
    value[3] += other.w * factor.y;
  }

  // What lanes first .. first + 7 hold for rows 0 to 7, of this lane's two rows.
  static __device__ __forceinline__ float2 of_own_rows(float x, int first) {
    const int even = first + 2 * (threadIdx.x & 3);
    return make_float2(__shfl_sync(0xffffffffu, x, even), __shfl_sync(0xffffffffu, x, even + 1));
  }
};

struct MergeShared {
  float4 values[kWarps][32];
  float2 stats[kWarps][8];
  MergeEntry entries[kThreads];
  int starts[kThreads];  // first task of an entry
  int warp_tasks[kWarps];
};

// Warps that share the partials of a part.
__device__ __forceinline__ int merge_groups(int count) {
  return count <= kMergeBatch ? 1 : count <= 2 * kMergeBatch ? 2 : count <= 4 * kMergeBatch ? 4 : kWarps;
}

// Lists entries base .. base + 255 and numbers their tasks. A task is what a block does at a time: the parts that its
// warps have room for. Returns the number of tasks.
__device__ __forceinline__ int list_tasks(const PortableArgs& args, int base, int parts, MergeShared& shared) {
  const int thread = threadIdx.x;
  MergeEntry entry{0, 0, 0, 0};
  if (base + thread < args.entries) entry = args.merge[base + thread];
  const int tasks = entry.count > 1 ? parts * merge_groups(entry.count) / kWarps : 0;
  const int through = warp_scan(tasks);
  if ((thread & 31) == 31) shared.warp_tasks[thread >> 5] = through;
  __syncthreads();
  int before = 0, total = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < thread >> 5) before += shared.warp_tasks[warp];
    total += shared.warp_tasks[warp];
  }
  shared.entries[thread] = entry;
  shared.starts[thread] = before + through - tasks;
  __syncthreads();
  return total;
}

// The entry that a task belongs to: the last that starts no later.
__device__ __forceinline__ int entry_of(const MergeShared& shared, int task) {
  const int lane = threadIdx.x & 31;
  const uint32_t coarse = __ballot_sync(0xffffffffu, shared.starts[8 * lane] <= task);
  const int first = 8 * (__popc(coarse) - 1);
  const uint32_t fine = __ballot_sync(0xffffffffu, lane < 8 && shared.starts[first + (lane & 7)] <= task);
  return first + __popc(fine) - 1;
}

// Sums float4 `element` of rows `row` .. `row` + 7 of an item over its partials `begin`, `begin` + `step`, ..
__device__ __forceinline__ PartSum sum_partials(const PortableArgs& args, int tile_rows, const MergeEntry& entry,
                                                int index, int element, int row, int begin, int step) {
  const int rows = min(args.useful_rows, args.p.nodes * args.p.heads - entry.row_tile * args.useful_rows) - row;
  const int stride = args.granule ? 1 : 2;
  const int next = args.granule ? entry.first : 2 * index;
  const auto slot_of = [&](int partial) {
    return static_cast<int64_t>(partial == 0 ? entry.first : next + partial * stride);
  };
  const int lane = threadIdx.x & 31;
  PartSum own;
#pragma unroll 1
  for (; begin < entry.count; begin += step * kMergeBatch) {
    float4 values[kMergeBatch];
    float2 stats[2];  // of row lane % 8 in the batch's partials lane / 8 and lane / 8 + 4
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int partial = begin + ((lane >> 3) + 4 * k) * step;
      stats[k] = make_float2(-FLT_MAX, 0.f);
      if (partial < entry.count) stats[k] = __ldcg(args.stats + slot_of(partial) * tile_rows + row + (lane & 7));
    }
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      const int partial = begin + i * step;
      values[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (partial < entry.count && 2 * (lane & 3) < rows) {
        values[i] = __ldcg(reinterpret_cast<const float4*>(args.partials + slot_of(partial) * tile_rows * kLatent) + element);
      }
    }
    float top = fmaxf(own.maximum, fmaxf(stats[0].x, stats[1].x));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 8));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 16));
    own.raise(top);
    const float factors[2] = {exp2_approx(stats[0].x - top), exp2_approx(stats[1].x - top)};
    float sum = stats[0].y * factors[0] + stats[1].y * factors[1];
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    own.sum += sum;
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) own.add(values[i], PartSum::of_own_rows(factors[i >> 2], 8 * (i & 3)));
  }
  return own;
}

// Joins the sums of warps first .. first + groups - 1, in order.
__device__ __forceinline__ PartSum join_groups(const MergeShared& shared, int first, int groups) {
  const int lane = threadIdx.x & 31;
  PartSum all;
  float top = -FLT_MAX;
#pragma unroll 1
  for (int group = 0; group < groups; ++group) top = fmaxf(top, shared.stats[first + group][lane & 7].x);
  all.maximum = top;
#pragma unroll 1
  for (int group = 0; group < groups; ++group) {
    const float2 stats = shared.stats[first + group][lane & 7];
    const float factor = exp2_approx(stats.x - top);
    all.sum += stats.y * factor;
    all.add(shared.values[first + group][lane], PartSum::of_own_rows(factor, 0));
  }
  return all;
}

// Normalises and writes rows `row` .. `row` + 7 of an item at columns `column` and `column` + 8 of each lane.
__device__ __forceinline__ void write_part(const PortableArgs& args, const MergeEntry& entry, PartSum& all, int row,
                                           int column, bool with_lse) {
  const TreeAttentionParams& p = args.p;
  const int lane = threadIdx.x & 31;
  const int rows = min(args.useful_rows, p.nodes * p.heads - entry.row_tile * args.useful_rows) - row;
  const int first = entry.row_tile * args.useful_rows + row;
  __nv_bfloat16* targets[2] = {nullptr, nullptr};
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const int own = 2 * (lane & 3) + odd;
    if (own >= rows) continue;
    const RowPlace place = place_row(p, entry.request, first + own);
    targets[odd] = static_cast<__nv_bfloat16*>(p.out) + place.token * p.out_token_stride + place.head * p.out_head_stride;
  }
  if (with_lse && lane < min(8, rows)) {
    const RowPlace place = place_row(p, entry.request, first + lane);
    p.lse[place.token * p.heads + place.head] = all.sum == 0.f ? -INFINITY : (all.maximum + log2f(all.sum)) * kLn2;
  }
  all.scale(all.sum == 0.f ? 0.f : 1.f / all.sum);
  store_fragment(targets[0], targets[1], column, all.value);
}

__global__ void __launch_bounds__(kThreads, kMergeResident)
    smxx_bf16_tree_attention_merge(const __grid_constant__ PortableArgs args, int tile_rows) {
  __shared__ MergeShared shared;
  wait_for_previous_launch();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row_blocks = tile_rows / 8;
  const int parts = row_blocks * kLatent / 16;
  for (int base = 0; base < args.entries; base += kThreads) {
    const int total = list_tasks(args, base, parts, shared);
    for (int task = blockIdx.x; task < total; task += gridDim.x) {
      const int which = entry_of(shared, task);
      const MergeEntry entry = shared.entries[which];
      const int groups = merge_groups(entry.count);
      const int part = ((task - shared.starts[which]) * kWarps + warp) / groups;
      const int stripe = part / row_blocks;  // part: stripe * row_blocks + n
      const int row = 8 * (part - stripe * row_blocks);
      PartSum all =
          sum_partials(args, tile_rows, entry, base + which, part * 32 + lane, row, warp & (groups - 1), groups);
      if (groups > 1) {
        shared.values[warp][lane] = make_float4(all.value[0], all.value[1], all.value[2], all.value[3]);
        if (lane < 8) shared.stats[warp][lane] = make_float2(all.maximum, all.sum);
        __syncthreads();
        if ((warp & (groups - 1)) == 0) all = join_groups(shared, warp, groups);
        __syncthreads();
      }
      if ((warp & (groups - 1)) == 0) write_part(args, entry, all, row, stripe * 16 + (lane >> 2), stripe == 0);
    }
    __syncthreads();
  }
}

}  // namespace treeverify
