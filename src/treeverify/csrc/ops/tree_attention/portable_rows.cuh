// A row tile of the portable kernel, its queries and accumulator in registers: the two products and the ends of a segment.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>

#include "device/ptx.cuh"
#include "device/softmax.cuh"
#include "device/swizzle.cuh"
#include "ops/tree_attention/portable_schedule.cuh"

namespace treeverify {

constexpr int kThreads = 256;
constexpr int kTileBytes = kTileKeys * kRowBytes;
constexpr float kLn2 = 0.6931471805599453f;

// Where a (node, head) row of a request lives; `row` counts within the request.
struct RowPlace {
  int64_t token;
  int head;
};

__device__ __forceinline__ RowPlace place_row(const TreeAttentionParams& p, int request, int row) {
  const int node = row / p.heads;
  return {static_cast<int64_t>(request) * p.nodes + node, row - node * p.heads};
}

__device__ __forceinline__ int rows_in_tile(const PortableArgs& args, int row_tile) {
  return min(args.useful_rows, args.p.nodes * args.p.heads - row_tile * args.useful_rows);
}

// Four values of an O^T fragment (columns c, c, c + 8, c + 8 of rows r, r + 1, r, r + 1, c = column = ... + lane / 4): lanes of
// even and odd column swap halves, so that each stores two neighbouring columns of one row at once.
__device__ __forceinline__ void store_fragment(__nv_bfloat16* even_row, __nv_bfloat16* odd_row, int column,
                                               const float (&v)[4]) {
  const bool odd = (column & 1) != 0;
  const float first = __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 4);
  const float second = __shfl_xor_sync(0xffffffffu, odd ? v[2] : v[3], 4);
  __nv_bfloat16* row = odd ? odd_row : even_row;
  if (row == nullptr) return;
  auto* target = reinterpret_cast<__nv_bfloat162*>(row + column - odd);
  target[0] = odd ? __floats2bfloat162_rn(first, v[1]) : __floats2bfloat162_rn(v[0], first);
  target[4] = odd ? __floats2bfloat162_rn(second, v[3]) : __floats2bfloat162_rn(v[2], second);
}

template <int kTileRows>
class RowTile {
  static constexpr int kBlocks = kTileRows / 8;  // n of one mma
  using Softmax = TileSoftmax<kTileRows>;

 public:
  // Copies the Q rows of the tile to shared memory at `target`; rows beyond the end become zero. Commits one group.
  static __device__ __forceinline__ void request_queries(const PortableArgs& args, const Segment& segment,
                                                         uint32_t target) {
    const TreeAttentionParams& p = args.p;
    const int rows = rows_in_tile(args, segment.row_tile);
    const int thread = cold_thread();
    const int chunk = thread & 7;
    for (int row = thread >> 3; row < kTileRows; row += kThreads / 8) {
      const bool wanted = row < rows;
      const auto* source = static_cast<const __nv_bfloat16*>(p.q);
      if (wanted) {
        const RowPlace place = place_row(p, segment.request, segment.row_tile * args.useful_rows + row);
        source += place.token * p.q_token_stride + place.head * p.q_head_stride;
      }
      const uint32_t base = target + swizzled_offset(row, chunk);
#pragma unroll
      for (int group = 0; group < kChunkGroups; ++group) {
        cp_async_16(base + group * 128, source + group * 64 + chunk * 8, wanted);
      }
    }
    cp_async_commit();
  }

  // Takes this warp's quarter of the dimensions of all rows into registers.
  __device__ __forceinline__ void load_queries(uint32_t source) {
    const int thread = cold_thread();
    const int lane = thread & 31;
    const int chunk = 2 * ((thread >> 5) & 3) + ((lane >> 3) & 1);
#pragma unroll
    for (int block = 0; block + 1 < kBlocks; block += 2) {
      const uint32_t base = source + swizzled_offset(8 * block + (lane & 7) + ((lane >> 4) << 3), chunk);
#pragma unroll
      for (int group = 0; group < kChunkGroups; ++group) {
        uint32_t d[4];
        ldmatrix_x4(d, base + group * 128);
        query_[group][block][0] = d[0];
        query_[group][block][1] = d[1];
        query_[group][block + 1][0] = d[2];
        query_[group][block + 1][1] = d[3];
      }
    }
    if (kBlocks % 2 == 1) {
      constexpr int kLast = kBlocks - 1;
      const uint32_t base = source + swizzled_offset(8 * kLast + (lane & 7), chunk);
#pragma unroll
      for (int group = 0; group < kChunkGroups; ++group) {
        ldmatrix_x2(query_[group][kLast][0], query_[group][kLast][1], base + group * 128);
      }
    }
  }

  // Works out where in a tile this thread's operands lie.
  __device__ __forceinline__ void place() {
    softmax.place();
    keys_ = opaque(keys(threadIdx.x));
    slice_ = opaque(slice(threadIdx.x));
    values_ = opaque(values(threadIdx.x));
    weights_ = opaque(weights(threadIdx.x));
  }

  __device__ __forceinline__ void clear(float slack) {
    softmax.clear(slack);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] = 0.f;
      }
    }
  }

  // S^T of one KV tile, this warp's 16 keys and quarter of the dimensions, into its slice of the scores.
  __device__ __forceinline__ void score(uint32_t stage, uint8_t* scores) const {
    const uint32_t base = stage + keys_;
    float sums[kBlocks][4];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.f;
    }
    uint32_t keys[2][4];  // the next fragment is on its way while one is used
    ldmatrix_x4(keys[0], base);
#pragma unroll
    for (int group = 0; group < kChunkGroups; ++group) {
      if (group + 1 < kChunkGroups) ldmatrix_x4(keys[(group + 1) & 1], base + (group + 1) * 128);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        mma_m16n8k16(sums[n], keys[group & 1], query_[group][n][0], query_[group][n][1]);
      }
    }
    uint8_t* target = scores + slice_;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      *reinterpret_cast<float2*>(target + n * 1024) = make_float2(sums[n][0], sums[n][2]);
      *reinterpret_cast<float2*>(target + n * 1024 + 128) = make_float2(sums[n][1], sums[n][3]);
    }
  }

  // O^T += V^T P^T over one KV tile.
  __device__ __forceinline__ void accumulate(uint32_t stage, uint32_t tile_weights) {
    const uint32_t column = stage + values_;  // a multiple of 128, plus the chunk
    uint32_t v[2][4];                         // the next fragment is on its way while one is used
    ldmatrix_x4_trans(v[0], column);
    uint32_t p[kBlocks][4];  // B fragments of P^T: both halves of the keys
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) ldmatrix_x4(p[n], tile_weights + weights_ + n * 512);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int half = i / 4, m = i % 4;  // 16 keys, 16 columns
      if (i < 7) {
        const int next_half = (i + 1) / 4, next_m = (i + 1) % 4;
        ldmatrix_x4_trans(v[(i + 1) & 1], (column ^ (next_m << 5)) + next_half * 16 * kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) mma_m16n8k16(out_[m][n], v[i & 1], p[n][2 * half], p[n][2 * half + 1]);
    }
  }

  // Multiplies every row by its factor.
  __device__ __forceinline__ void rescale(const uint8_t* factors) {
    const int thread = cold_thread();
    float2 all[kBlocks];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) all[n] = Softmax::factors_of(factors, 8 * n + 2 * (thread & 3));
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float2 factor = all[n];
      if (!__any_sync(0xffffffffu, factor.x != 1.f || factor.y != 1.f)) continue;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        out_[m][n][0] *= factor.x;
        out_[m][n][1] *= factor.y;
        out_[m][n][2] *= factor.x;
        out_[m][n][3] *= factor.y;
      }
    }
  }

  // Ends a segment: normalises and writes the output, or leaves a partial result.
  __device__ __forceinline__ void finish(const PortableArgs& args, const Segment& segment, uint8_t* scratch) {
    const int thread = cold_thread();
    const bool partial = segment.slot >= 0;
    if (partial) {
      store_partial(args.partials + static_cast<int64_t>(segment.slot) * (kTileRows * kLatent),
                    rows_in_tile(args, segment.row_tile));
    }
    __syncthreads();  // everyone is done with what `scratch` held
    softmax.totals(scratch);
    __syncthreads();
    const auto* references = reinterpret_cast<const float*>(scratch);
    float* sums = reinterpret_cast<float*>(scratch) + kTileRows;
    auto* places = reinterpret_cast<int64_t*>(scratch + 8 * kTileRows);
    if (thread < kTileRows) {
      const float reference = references[thread];
      const float sum = sums[thread];
      if (partial) {
        args.stats[static_cast<int64_t>(segment.slot) * kTileRows + thread] = make_float2(reference, sum);
      } else {
        places[thread] = -1;
        if (thread < rows_in_tile(args, segment.row_tile)) {
          const RowPlace place = place_row(args.p, segment.request, segment.row_tile * args.useful_rows + thread);
          args.p.lse[place.token * args.p.heads + place.head] =
              sum == 0.f ? -INFINITY : (reference + log2f(sum)) * kLn2;
          places[thread] = place.token * args.p.out_token_stride + place.head * args.p.out_head_stride;
        }
        sums[thread] = sum == 0.f ? 0.f : 1.f / sum;
      }
    }
    if (!partial) {
      __syncthreads();
      store_output(static_cast<__nv_bfloat16*>(args.p.out), sums, places);
    }
  }

  Softmax softmax;

 private:
  // Fragment order: [warp][m][n][lane] of four floats, so that stores and the merge's loads are contiguous. Nobody reads
  // rows beyond the last.
  __device__ __forceinline__ void store_partial(float* target, int rows) const {
    const int thread = cold_thread();
    auto* base = reinterpret_cast<float4*>(target) + (thread >> 5) * 4 * kBlocks * 32 + (thread & 31);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float(&v)[4] = out_[m][n];
        if (8 * n + 2 * (thread & 3) < rows) base[(m * kBlocks + n) * 32] = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }

  // `factors` and `places` (elements from `out`, negative: no such row) of all rows, in shared memory.
  __device__ __forceinline__ void store_output(__nv_bfloat16* out, const float* factors, const int64_t* places) {
    const int thread = cold_thread();
    const int lane = thread & 31;
    const int column = (thread >> 5) * 64 + (lane >> 2);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int row = 8 * n + 2 * (lane & 3);
      const float even = factors[row], odd = factors[row + 1];
      const int64_t even_place = places[row], odd_place = places[row + 1];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float(&v)[4] = out_[m][n];
        const float scaled[4] = {v[0] * even, v[1] * odd, v[2] * even, v[3] * odd};
        store_fragment(even_place < 0 ? nullptr : out + even_place, odd_place < 0 ? nullptr : out + odd_place,
                       column + 16 * m, scaled);
      }
    }
  }

  // Byte offsets in a stage, twice, in the scores, in the weights.
  static __device__ __forceinline__ uint32_t keys(int thread) {
    const int warp = thread >> 5, lane = thread & 31;
    return swizzled_offset(16 * (warp >> 2) + (lane & 15), 2 * (warp & 3) + (lane >> 4));
  }

  static __device__ __forceinline__ uint32_t values(int thread) {
    const int warp = thread >> 5, lane = thread & 31;
    const int key = (lane & 7) + ((lane >> 4) << 3);  // in the order of the weights: 0, 8, 1, 9, ..
    const int row = (key >> 1) + ((key & 1) << 3);
    return row * kRowBytes + warp * 128 + ((((lane >> 3) & 1) ^ swizzle_key(row)) << 4);
  }

  static __device__ __forceinline__ uint32_t slice(int thread) {
    const int warp = thread >> 5, lane = thread & 31;
    return (warp & 3) * Softmax::kSliceBytes + Softmax::score_offset(2 * (lane & 3), 16 * (warp >> 2) + 2 * (lane >> 2));
  }

  static __device__ __forceinline__ uint32_t weights(int thread) {
    const int lane = thread & 31;
    return Softmax::weight_offset(lane & 7, lane >> 3);
  }

  uint32_t keys_, values_, slice_, weights_;
  uint32_t query_[kChunkGroups][kBlocks][2];  // B fragments of Q^T
  float out_[4][kBlocks][4];                  // O^T: 16 latent columns x 8 rows each
};

}  // namespace treeverify
