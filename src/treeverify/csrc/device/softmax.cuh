// The running softmax of a key tile, over scores that four warps left in shared memory as partial sums.
//
// A *score buffer* holds four slices [R rows][kScoreStride] of fp32: slice s is the share of the dimensions that the
// warps of k-slice s own, columns 0..31 are the keys of the tile. A stride of 36 words makes both the fragment stores
// (rows 2t, keys g) and the reads (one row, 32 keys) free of conflicts. Once a row is summed, its weights overwrite it
// in slice 0 as bf16: only the warp that owns the row ever reads its sums. 144 bytes between rows of weights is an odd
// multiple of 16, so ldmatrix is free of conflicts too. The padding columns hold what a row needs beside its keys.
#pragma once

#include <cfloat>
#include <cstdint>

#include "device/ptx.cuh"

namespace treeverify {

constexpr int kScoreStride = 36;                      // words
constexpr int kScoreStrideBytes = kScoreStride * 4;
constexpr int kSlices = 4;
constexpr int kFactorColumn = 32;   // of slice 0: what the accumulator of the row is multiplied by before this tile
constexpr int kMaximumColumn = 33;  // of slice 0, at the end of a segment
constexpr int kSumColumn = 34;      // of slice 0, at the end of a segment
constexpr int kParkColumn = 32;    // of slice 1: 16 bytes a row for what registers are too precious to hold

// Handles rows kRows * warp and the following ones. `visible` bit i: this lane's key may be seen by row i.
// `maximum` (base 2, scaled) of row i lives in lane i; -FLT_MAX stands for "nothing yet", so that no infinities meet.
// Returns true (in all lanes) if the maximum of any of the warp's rows grew.
template <int kTileRows>
__device__ __forceinline__ bool softmax_tile(float* scores, uint32_t visible, float scale_log2, float& maximum) {
  constexpr int kRows = kTileRows / 8;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  float* own = scores + warp * kRows * kScoreStride;
  float score[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float sum = 0.f;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) sum += own[(slice * kTileRows + i) * kScoreStride + lane];
    score[i] = (visible >> i) & 1 ? sum * scale_log2 : -INFINITY;
  }
  float reference[kRows];
  bool exceeds = false;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    reference[i] = __shfl_sync(0xffffffffu, maximum, i);
    exceeds |= score[i] > reference[i];
  }
  float factor = 1.f;
  const bool grew = __any_sync(0xffffffffu, exceeds);
  if (grew) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float top = score[i];
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
      top = fmaxf(top, reference[i]);
      if (lane == i) {
        factor = exp2_approx(reference[i] - top);
        maximum = top;
      }
      reference[i] = top;
    }
  }
  if (lane < kRows) own[lane * kScoreStride + kFactorColumn] = factor;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    auto* weights = reinterpret_cast<__nv_bfloat16*>(own + i * kScoreStride);
    weights[lane] = __float2bfloat16_rn(exp2_approx(score[i] - reference[i]));
  }
  return grew;
}

}  // namespace treeverify
