// The running softmax of a key tile of 32 keys, over scores that four warps left in shared memory as partial sums.
//
// Scores: four slices (slice s: the share of the dimensions that the warps of k-slice s own) of 2 * R / 8 *blocks* of
// 512 bytes: block h * R / 8 + n holds keys 16h .. + 15 of rows 8n .. + 7 as the fragments of the product S^T. Lane
// (g, t) = (l / 4, l % 4) holds 16 bytes: rows 2t and 2t + 1 at key g, then both at key g + 8.
//
// Every thread weighs R / 8 scores, whatever row they belong to: with R >= 32 the fragment of lane `lane` of block `warp`,
// then, of what is left, one score or the two scores of one row in 16 bytes. Weights are relative to their row's
// *reference*, a maximum that may be stale: all references are raised to the maxima so far, by all threads together
// (raise), only when a score exceeds its own by more than the *slack*; until then weights are simply greater than one.
// The final division makes it exact. A small slack keeps the largest weights close to 1.0, where bf16 has no error; that
// shows only where few keys dominate, so long prefixes have a large one.
//
// Weights: bf16, per 8 rows four chunks [8 keys][8 rows][16 bytes], rows of odd chunks exchanged in pairs, so that both
// the 32-bit stores and ldmatrix are free of conflicts. Within 16 keys the order is 0, 8, 1, 9, 2, 10, ..: neighbours are
// what one thread holds.
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
  static constexpr int kBlocks = kTileRows / 8;
  static constexpr int kMain = kBlocks >= 4 ? 4 : 0;  // scores of the fragment that belongs to this lane alone
  static constexpr int kRest = kBlocks - kMain;       // scores of the shared blocks, of one row
  static constexpr int kMainRows = kMain / 2;
  static constexpr int kRows = kMainRows + (kRest > 0);  // rows that this thread's scores belong to
  static constexpr int kRestOffset = kMain > 0 ? 8 * 512 : 0;
  static_assert(kRest <= 2);

 public:
  static constexpr int kSliceBytes = 2 * kBlocks * 512;
  static constexpr int kScoreBytes = kSlices * kSliceBytes;
  static constexpr int kWeightBytes = kTileRows * 64;
  static constexpr int kMaximaBytes = kTileRows * 8;       // maxima so far (ordered), then references
  static constexpr int kTotalsBytes = kTileRows * 18 * 4;  // for totals

  // Works out where this thread's scores and weights lie.
  __device__ __forceinline__ void place() {
    main_scores_ = opaque(main_scores(threadIdx.x));
    main_weights_ = opaque(main_weights(threadIdx.x));
    rest_weights_ = opaque(rest_weights(threadIdx.x));
  }

  // Valid after a barrier.
  __device__ __forceinline__ void clear(uint8_t* maxima, float slack) {
    const int thread = cold_thread();
    if (thread < kTileRows) {
      reinterpret_cast<int*>(maxima)[thread] = ordered(-FLT_MAX);
      reinterpret_cast<float*>(maxima)[kTileRows + thread] = -FLT_MAX;
    }
    slack_ = slack;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      reference_[i] = -FLT_MAX;  // "nothing yet": no infinities meet
      sum_[i] = pending_[i] = 0.f;
    }
  }

  // Row and key, within the tile, of score `i` of a thread, i < kTileRows / 8.
  static __device__ __forceinline__ void locate(int thread, int i, int& row, int& key) {
    const bool rest = i >= kMain;
    const int at = rest ? rest_word(thread) : 0;  // in words
    const int block = rest ? (kMain > 0 ? 8 : 0) + (at >> 7) : thread >> 5;
    const int lane = rest ? (at & 127) >> 2 : thread & 31;
    const int item = rest ? (((at >> 1) & 1) + (i - kMain)) + 2 * (at & 1) : i;  // key, then row
    const int half = block / kBlocks;
    row = 8 * (block - half * kBlocks) + 2 * (lane & 3) + (item >> 1);
    key = 16 * half + (lane >> 2) + 8 * (item & 1);
  }

  // Writes the weights of a tile and lifts the maxima. Bit i of `visible` says whether score i counts. Returns whether a
  // score exceeds its reference so far that the references must be raised.
  template <bool kMasked>
  __device__ __forceinline__ bool weigh(const uint8_t* scores, uint8_t* weights, uint32_t visible, float scale_log2,
                                        uint8_t* maxima) {
    float score[kBlocks], x[kBlocks];
    read(scores, score);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      x[i] = fmaf(score[i], scale_log2, -reference_[row_of(i)]);
      if (kMasked && !((visible >> i) & 1)) x[i] = -INFINITY;
    }
    float top = x[0];
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) top = fmaxf(top, x[i]);
    write(weights, x);
    if (__builtin_expect(top > 0.f, false)) {
      float best[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) best[i] = -INFINITY;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (x[i] > 0.f) best[row_of(i)] = fmaxf(best[row_of(i)], score[i] * scale_log2);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (best[i] == -INFINITY) continue;
        atomicMax(reinterpret_cast<int*>(maxima) + owned_row(cold_thread(), i), ordered(best[i]));
      }
    }
    return top > slack_;
  }

  // Counts the weights of the last tile.
  __device__ __forceinline__ void commit() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum_[i] += pending_[i];
  }

  // Instead of the last `weigh` (of the same tile), after a barrier and before its commit: raises all references to the
  // maxima and weighs again. The accumulators must be multiplied by `factors`, then all threads must call `raised`.
  __device__ __forceinline__ void raise(const uint8_t* scores, uint8_t* weights, uint32_t visible, float scale_log2,
                                        const uint8_t* maxima) {
    const int thread = cold_thread();
    float x[kBlocks];
    read(scores, x);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float reference = from_ordered(reinterpret_cast<const int*>(maxima)[owned_row(thread, i)]);
      sum_[i] *= exp2_approx(reference_[i] - reference);
      reference_[i] = reference;
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      x[i] = (visible >> i) & 1 ? fmaf(x[i], scale_log2, -reference_[row_of(i)]) : -INFINITY;
    }
    write(weights, x);
  }

  // What the rows `row` and `row` + 1 must be multiplied by.
  static __device__ __forceinline__ float2 factors(const uint8_t* maxima, int row) {
    const int2 top = *reinterpret_cast<const int2*>(maxima + 4 * row);
    const float2 old = *reinterpret_cast<const float2*>(maxima + 4 * (kTileRows + row));
    return make_float2(exp2_approx(old.x - from_ordered(top.x)), exp2_approx(old.y - from_ordered(top.y)));
  }

  // A barrier: the new weights and references are there for all.
  static __device__ __forceinline__ void raised(uint8_t* maxima) {
    const int thread = cold_thread();
    const bool mine = thread < kTileRows;
    const float reference = mine ? from_ordered(reinterpret_cast<const int*>(maxima)[thread]) : 0.f;
    __syncthreads();
    if (mine) reinterpret_cast<float*>(maxima)[kTileRows + thread] = reference;
  }

  // At the end of a segment: the rows' references (base 2) to scratch[row] and sums of weights to scratch[R + row], both
  // valid after a barrier. All threads must call, and `scratch` must be free.
  __device__ __forceinline__ void totals(uint8_t* scratch) const {
    const int thread = cold_thread();
    auto* references = reinterpret_cast<float*>(scratch);
    float* sums = references + kTileRows;
    float* parts = sums + kTileRows;  // [16][kTileRows]: by warp, main and rest
    for (int i = thread; i < 16 * kTileRows; i += 256) parts[i] = 0.f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      references[owned_row(thread, i)] = reference_[i];
      const bool rest = i >= kMainRows;
      float sum = sum_[i];
      // the lanes of a warp that share a row
      if (rest && kRest == 1) sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (!rest) sum += __shfl_xor_sync(0xffffffffu, sum, 4);
      if (!rest || kRest == 2) sum += __shfl_xor_sync(0xffffffffu, sum, 8);
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
      parts[((thread >> 5) + (rest ? 8 : 0)) * kTileRows + owned_row(thread, i)] = sum;
    }
    __syncthreads();
    if (thread < kTileRows) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 16; ++i) sum += parts[i * kTileRows + thread];
      sums[thread] = sum;
    }
  }

 private:
  static __device__ __forceinline__ constexpr int row_of(int i) { return i < kMain ? i >> 1 : kMainRows; }

  static __device__ __forceinline__ int owned_row(int thread, int i) {
    int row, key;
    locate(thread, i < kMainRows ? 2 * i : kMain, row, key);
    return row;
  }

  // Byte offset, in a buffer of weights, of the pair of keys (key, key + 8) of a row; key % 16 < 8.
  static __device__ __forceinline__ int pair_offset(int row, int key) {
    const int upper = (key >> 2) & 1;
    return (row >> 3) * 512 + (2 * (key >> 4) + upper) * 128 + (((row & 7) ^ upper) << 4) + (key & 3) * 4;
  }

  // Where the (first) score of a thread lies in the shared blocks.
  static __device__ __forceinline__ int rest_word(int thread) {
    return kRest == 1 ? thread : 4 * (thread >> 1) + (thread & 1);
  }

  // Byte offsets in a slice of the scores and in the weights.
  static __device__ __forceinline__ int main_scores(int thread) { return thread * 16; }

  static __device__ __forceinline__ int main_weights(int thread) {
    int row, key;
    locate(thread, 0, row, key);
    return pair_offset(row, key);
  }

  static __device__ __forceinline__ int rest_weights(int thread) {
    int row, key;
    locate(thread, kMain, row, key);
    return pair_offset(row, key & ~8) + ((key >> 3) & 1) * 2;
  }

  __device__ __forceinline__ void read(const uint8_t* scores, float (&x)[kBlocks]) const {
    const int own = main_scores_;
    if constexpr (kMain > 0) {
      float4 part[kSlices];
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        part[s] = *reinterpret_cast<const float4*>(scores + s * kSliceBytes + own);
      }
      x[0] = (part[0].x + part[1].x) + (part[2].x + part[3].x);
      x[2] = (part[0].y + part[1].y) + (part[2].y + part[3].y);
      x[1] = (part[0].z + part[1].z) + (part[2].z + part[3].z);
      x[3] = (part[0].w + part[1].w) + (part[2].w + part[3].w);
    }
    const uint8_t* rest = scores + kRestOffset + 4 * rest_word(own >> 4);
#pragma unroll
    for (int i = 0; i < kRest; ++i) {
      float part[kSlices];
#pragma unroll
      for (int s = 0; s < kSlices; ++s) part[s] = *reinterpret_cast<const float*>(rest + s * kSliceBytes + 8 * i);
      x[kMain + i] = (part[0] + part[1]) + (part[2] + part[3]);
    }
  }

  // Two weights, rounded, to `target`; returns their sum as rounded.
  static __device__ __forceinline__ float write_pair(uint8_t* target, float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(exp2_approx(first), exp2_approx(second));
    *reinterpret_cast<__nv_bfloat162*>(target) = pair;
    return __low2float(pair) + __high2float(pair);
  }

  __device__ __forceinline__ void write(uint8_t* weights, const float (&x)[kBlocks]) {
    if constexpr (kMain > 0) {
      const int main = main_weights_;
      pending_[0] = write_pair(weights + main, x[0], x[1]);
      pending_[1] = write_pair(weights + (main ^ 16), x[2], x[3]);
    }
    const int rest = rest_weights_;
    if constexpr (kRest == 1) {
      const __nv_bfloat16 weight = __float2bfloat16_rn(exp2_approx(x[kMain]));
      *reinterpret_cast<__nv_bfloat16*>(weights + rest) = weight;
      pending_[kMainRows] = __bfloat162float(weight);
    } else if constexpr (kRest == 2) {
      pending_[kMainRows] = write_pair(weights + rest, x[kMain], x[kMain + 1]);
    }
  }

  int main_scores_, main_weights_, rest_weights_;
  float slack_;
  float reference_[kRows];
  float sum_[kRows];      // this thread's share of the weights of all tiles before the last
  float pending_[kRows];  // and of the last
};

}  // namespace treeverify
