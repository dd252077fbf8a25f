// The running softmax of a key tile of 32 keys, over scores that four warps left in shared memory as partial sums.
//
// Scores: four slices (slice s: the share of the dimensions that the warps of k-slice s own) of R rows of 32 floats, the
// keys of a row in the order 0, 8, 1, 9, .. within 16 (neighbours are what one thread of the product S^T holds), moved by
// 8 * (row / 2 % 4), exclusive or: neither the 64-bit stores nor the reads of a row conflict.
//
// Warp w owns rows w, w + 8, .., lane l the l-th key of each, so that a row's maximum is a matter of one warp. Weights are
// relative to the row's *reference*, a maximum that may be stale: when a score exceeds its own by more than the *slack*,
// the warp raises its references to the maxima so far and leaves the factors that the accumulators must be multiplied by;
// until then weights are simply greater than one. The final division makes it exact. A small slack keeps the largest
// weights close to 1.0, where bf16 has no error; that shows only where few keys dominate, so long prefixes have a large one.
//
// Weights: bf16, per 8 rows four chunks [8 keys][8 rows][16 bytes] in the order of the scores, row r of chunk c where
// r ^ 2c would be, so that both the stores and ldmatrix are free of conflicts.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cuda_bf16.h>

#include "device/ptx.cuh"

namespace treeverify {

constexpr int kSlices = 4;
constexpr float kSlack = 8.f, kSmallSlack = 1.f;  // base 2

// Floats as integers that compare alike.
__device__ __forceinline__ int ordered(float x) {
  const int bits = __float_as_int(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ __forceinline__ float from_ordered(int bits) { return __int_as_float(bits ^ ((bits >> 31) & 0x7fffffff)); }

template <int kTileRows>
class TileSoftmax {
  static constexpr int kRows = kTileRows / 8;  // of a warp: 8i + warp

 public:
  static constexpr int kSliceBytes = kTileRows * 128;
  static constexpr int kScoreBytes = kSlices * kSliceBytes;
  static constexpr int kWeightBytes = kTileRows * 64;
  static constexpr int kFactorBytes = kTileRows * 4;
  static constexpr int kTotalsBytes = kTileRows * 8;  // for totals

  // Byte offset in a slice of the scores of `row` and position `at` in the order of the keys.
  static __device__ __forceinline__ uint32_t score_offset(int row, int at) {
    return row * 128 + ((at ^ (((row >> 1) & 3) << 3)) << 2);
  }

  // Byte offset of chunk `chunk` of `row` in the weights.
  static __device__ __forceinline__ uint32_t weight_offset(int row, int chunk) {
    return (row >> 3) * 512 + chunk * 128 + (((row ^ (2 * chunk)) & 7) << 4);
  }

  // Works out where this thread's scores and weights lie.
  __device__ __forceinline__ void place() {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    scores_ = opaque(score_offset(warp, lane));
    weights_ = opaque(weight_offset(warp, lane >> 3) + 2 * (lane & 7));
  }

  __device__ __forceinline__ void clear(float slack) {
    slack_ = slack;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      reference_[i] = -FLT_MAX;  // "nothing yet": no infinities meet
      sum_[i] = 0.f;
    }
  }

  // Row and key, within the tile, of score `i` of a thread, i < kTileRows / 8.
  static __device__ __forceinline__ void locate(int thread, int i, int& row, int& key) {
    const int lane = thread & 31;
    row = 8 * i + (thread >> 5);
    key = (lane & 16) + ((lane & 15) >> 1) + ((lane & 1) << 3);
  }

  // Writes the weights of a tile and the rows' factors. Bit i of `visible` says whether score i counts. Returns whether
  // any factor of this warp may differ from one: then the accumulators must be multiplied before the weights are used.
  __device__ __forceinline__ bool weigh(const uint8_t* scores, uint8_t* weights, uint8_t* factors, uint32_t visible,
                                        float scale_log2) {
    float score[kRows], x[kRows];
    read(scores, score);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (!((visible >> i) & 1)) score[i] = -INFINITY;
      x[i] = fmaf(score[i], scale_log2, -reference_[i]);
    }
    float top = x[0];
#pragma unroll
    for (int i = 1; i < kRows; ++i) top = fmaxf(top, x[i]);
    float factor = 1.f;  // lane i: of row i
    const bool raised = __any_sync(0xffffffffu, top > slack_);
    if (raised) {
      const int lane = cold_thread() & 31;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float highest = from_ordered(__reduce_max_sync(0xffffffffu, ordered(score[i]))) * scale_log2;
        const float reference = fmaxf(reference_[i], highest);
        const float own = exp2_approx(reference_[i] - reference);
        if (lane == i) factor = own;
        sum_[i] *= own;
        reference_[i] = reference;
        x[i] = fmaf(score[i], scale_log2, -reference);
      }
    }
    write(weights, x);
    const int thread = cold_thread();
    if ((thread & 31) < kRows) reinterpret_cast<float*>(factors)[8 * (thread & 31) + (thread >> 5)] = factor;
    return raised;
  }

  // What the rows `row` and `row` + 1 must be multiplied by.
  static __device__ __forceinline__ float2 factors_of(const uint8_t* factors, int row) {
    return *reinterpret_cast<const float2*>(factors + 4 * row);
  }

  // At the end of a segment: the rows' references (base 2) to scratch[row] and sums of weights to scratch[R + row], both
  // valid after a barrier. All threads must call, and `scratch` must be free.
  __device__ __forceinline__ void totals(uint8_t* scratch) const {
    const int thread = cold_thread();
    float* references = reinterpret_cast<float*>(scratch) + (thread >> 5);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float sum = warp_sum(sum_[i]);
      if ((thread & 31) != 0) continue;
      references[8 * i] = reference_[i];
      references[kTileRows + 8 * i] = sum;
    }
  }

 private:
  __device__ __forceinline__ void read(const uint8_t* scores, float (&x)[kRows]) const {
    const uint8_t* own = scores + scores_;
    float part[kRows][kSlices];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        part[i][s] = *reinterpret_cast<const float*>(own + s * kSliceBytes + i * 1024);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] = (part[i][0] + part[i][1]) + (part[i][2] + part[i][3]);
  }

  // The weights, rounded; adds them, as rounded, to the sums.
  __device__ __forceinline__ void write(uint8_t* weights, const float (&x)[kRows]) {
    uint8_t* own = weights + weights_;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const __nv_bfloat16 weight = __float2bfloat16_rn(exp2_approx(x[i]));
      *reinterpret_cast<__nv_bfloat16*>(own + i * 512) = weight;
      sum_[i] += __bfloat162float(weight);
    }
  }

  uint32_t scores_, weights_;
  float slack_;
  float reference_[kRows];
  float sum_[kRows];  // this lane's share of the weights
};

}  // namespace treeverify
