// Split-KV flash attention over a draft tree on the tensor cores that sm_80 to sm_121 share (mma.sync).
//
// Computes, for each (request, node, head), softmax(q K^T * scale) V and its LSE, V being the first 512 columns of K.
// The nodes x heads rows of a request are packed and cut into row tiles of kTileRows; portable_schedule.cuh says which
// CTA handles which keys of which row tile. 256 threads, one CTA per multiprocessor.
//
// The operands are swapped, keys and latent columns stand where rows usually do: S^T = K Q^T and O^T = V^T P^T, so rows
// come in steps of 8 instead of 16, and one KV tile in shared memory feeds both products (ldmatrix, then transposed).
//   S^T: warp w owns 16 keys (w / 4) and a quarter of the dimensions (w % 4: columns 64i + 16 (w % 4) .. + 15 for
//        i < 9), so its share of Q stays in registers for the whole segment and each K element is loaded once.
//        The four quarters meet in a score buffer in shared memory (softmax.cuh).
//   softmax: warp w owns kTileRows / 8 rows, a lane is a key.
//   O^T: warp w owns latent columns 64w .. 64w + 63 of all rows; the accumulator stays in registers.
//
// KV rows are gathered by cp.async, eight threads to a row, 128 bytes at a time; draft rows follow the prefix in the
// same key order. Keys beyond the end, and draft rows that no node sees, are filled with zeros: no NaN can come from
// them. Scores of draft keys that a row does not see are replaced by -inf.
//
// Two schedules:
//   phased:    wait for tile j | S | softmax | O, three barriers a tile; kStages - 1 tiles in flight.
//   pipelined: between two barriers every warp does S of tile j, softmax of j - 1 and O of j - 2; one tile in flight.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cuda_bf16.h>

#include "device/mask.cuh"
#include "device/ptx.cuh"
#include "device/softmax.cuh"
#include "device/swizzle.cuh"
#include "ops/tree_attention/portable_schedule.cuh"

namespace treeverify {

constexpr int kThreads = 256;
constexpr int kTileBytes = kTileKeys * kRowBytes;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <int kTileRows_, int kStages_, bool kPipelined_>
struct PortableConfig {
  static constexpr int kTileRows = kTileRows_;
  static constexpr int kStages = kStages_;
  static constexpr bool kPipelined = kPipelined_;
  static constexpr int kRowBlocks = kTileRows / 8;  // n of one mma
  static constexpr int kScoreBuffers = kPipelined ? 3 : 1;
  static constexpr int kScoreWords = kSlices * kTileRows * kScoreStride;
  static constexpr int kSharedBytes = kStages * kTileBytes + kScoreBuffers * kScoreWords * 4;
  static_assert(kTileRows % 8 == 0 && kStages >= (kPipelined ? 4 : 2));
  // Q is staged behind the first KV tile, across whatever follows.
  static_assert(kTileBytes + kTileRows * kRowBytes <= kSharedBytes);
};

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

// Four values of an O^T fragment (columns c, c, c + 8, c + 8 of rows r, r + 1, r, r + 1, c = ... + lane / 4): lanes of
// even and odd column swap halves, so that each stores two neighbouring columns of one row at once.
__device__ __forceinline__ void store_fragment(__nv_bfloat16* even_row, __nv_bfloat16* odd_row, int column,
                                               const float (&v)[4]) {
  const bool odd = (threadIdx.x >> 2) & 1;
  const float first = __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 4);
  const float second = __shfl_xor_sync(0xffffffffu, odd ? v[2] : v[3], 4);
  __nv_bfloat16* row = odd ? odd_row : even_row;
  if (row == nullptr) return;
  auto* target = reinterpret_cast<__nv_bfloat162*>(row + column - odd);
  target[0] = odd ? __floats2bfloat162_rn(first, v[1]) : __floats2bfloat162_rn(v[0], first);
  target[4] = odd ? __floats2bfloat162_rn(second, v[3]) : __floats2bfloat162_rn(v[2], second);
}

// Gathers KV tiles. Thread t copies chunks t % 8, t % 8 + 8, ... of row t / 8. The slot of the tile after the one being
// requested is already on its way, so that a gather never waits for its index.
class TileLoader {
 public:
  __device__ __forceinline__ void prefetch_slot(const PortableArgs& args, const Segment& segment, int tile) {
    const int key = tile * kTileKeys + row();
    if (tile < segment.tile_end && key < segment.prefix) {
      slot_ = static_cast<int>(load_integer(args.p.kv_indices, args.p.indices_is_64, segment.begin + key));
    }
  }

  // Requests `tile` (whose slot was prefetched) and prefetches the next slot. Commits one group, empty at the end.
  __device__ __forceinline__ void request(const PortableArgs& args, const Segment& segment, int tile, uint32_t stage) {
    if (tile < segment.tile_end) {
      const TreeAttentionParams& p = args.p;
      const int column = tile * kTileKeys + row() - segment.prefix;
      const auto* source = static_cast<const __nv_bfloat16*>(p.kv_pool);
      bool wanted = true;
      if (column < 0) {
        source += slot_ * p.pool_stride;
      } else if (column < p.nodes) {
        source = static_cast<const __nv_bfloat16*>(p.draft_kv) +
                 (static_cast<int64_t>(segment.request) * p.nodes + column) * p.draft_stride;
      } else {
        wanted = false;
      }
      if ((tile + 1) * kTileKeys > segment.prefix) {
        const bool seen = any_node_sees(p, segment.request, segment.prefix, column);
        wanted = wanted && (seen || column < 0);
      }
      const int chunk = threadIdx.x & 7;
      const uint32_t target = stage + swizzled_offset(row(), chunk);
      source += chunk * 8;
#pragma unroll
      for (int group = 0; group < kChunkGroups; ++group) cp_async_16(target + group * 128, source + group * 64, wanted);
      prefetch_slot(args, segment, tile + 1);
    }
    cp_async_commit();
  }

 private:
  static __device__ __forceinline__ int row() { return threadIdx.x >> 3; }

  int slot_ = 0;  // a pool of 2^31 rows would be 2.5 TB; products with the stride are 64-bit
};

template <class Config>
class RowTile {
  static constexpr int kTileRows = Config::kTileRows;
  static constexpr int kBlocks = Config::kRowBlocks;

 public:
  // Copies the Q rows of the tile to shared memory at `target`; rows beyond the end become zero. Commits one group.
  static __device__ __forceinline__ void request_queries(const PortableArgs& args, const Segment& segment,
                                                         uint32_t target) {
    const TreeAttentionParams& p = args.p;
    const int rows = rows_in_tile(args, segment.row_tile);
    const int chunk = threadIdx.x & 7;
    for (int row = threadIdx.x >> 3; row < kTileRows; row += kThreads / 8) {
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
    const int lane = threadIdx.x & 31;
    const int chunk = 2 * (warp() & 3) + ((lane >> 3) & 1);
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

  __device__ __forceinline__ void clear() {
    maximum_ = -FLT_MAX;
    sum_ = 0.f;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] = 0.f;
      }
    }
  }

  // S^T of one KV tile, this warp's 16 keys and quarter of the dimensions, into its slice of the score buffer.
  __device__ __forceinline__ void score(uint32_t stage, float* scores) {
    const int lane = threadIdx.x & 31;
    const int key = (warp() >> 2) * 16;
    const uint32_t base =
        stage + swizzled_offset(key + (lane & 7) + (lane & 8), 2 * (warp() & 3) + (lane >> 4));
    float sums[kBlocks][4];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.f;
    }
#pragma unroll
    for (int group = 0; group < kChunkGroups; ++group) {
      uint32_t keys[4];
      ldmatrix_x4(keys, base + group * 128);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) mma_m16n8k16(sums[n], keys, query_[group][n][0], query_[group][n][1]);
    }
    float* target = scores + ((warp() & 3) * kTileRows + 2 * (lane & 3)) * kScoreStride + key + (lane >> 2);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float* block = target + 8 * n * kScoreStride;
      block[0] = sums[n][0];
      block[kScoreStride] = sums[n][1];
      block[8] = sums[n][2];
      block[kScoreStride + 8] = sums[n][3];
    }
  }

  __device__ __forceinline__ bool softmax(float* scores, uint32_t visible, float scale_log2) {
    return softmax_tile<kTileRows>(scores, visible, scale_log2, maximum_);
  }

  // O^T += V^T P^T over one KV tile; `rescale` (CTA-uniform) says whether any row's maximum grew in this tile.
  __device__ __forceinline__ void accumulate(uint32_t stage, const float* scores, bool rescale) {
    const int lane = threadIdx.x & 31;
    const uint32_t weights = shared_address(scores);
    if (rescale) rescale_rows(scores);
    if (warp() < kBlocks) add_weights(weights, lane);
    const int key = (lane & 7) + ((lane >> 4) << 3);
    const uint32_t row = stage + key * kRowBytes + warp() * 128;
    const uint32_t chunk = (((lane >> 3) & 1) ^ (lane & 7)) << 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 16 keys each
      uint32_t p[kBlocks][2];
      load_weights(p, weights + half * 32, lane);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        uint32_t values[4];
        ldmatrix_x4_trans(values, row + (chunk ^ (m << 5)) + half * 16 * kRowBytes);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) mma_m16n8k16(out_[m][n], values, p[n][0], p[n][1]);
      }
    }
  }

  // Ends a segment: normalises and writes the output, or leaves a partial result.
  __device__ __forceinline__ void finish(const PortableArgs& args, const Segment& segment, float* scores) {
    const int lane = threadIdx.x & 31;
    const int thread = threadIdx.x;
    constexpr int kRows = kTileRows / 8;
    __syncthreads();  // everyone is done with the weights of the last tile, and with its factors
    float total = sum_;
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (warp() < kBlocks && (lane & 3) == 0) scores[(8 * warp() + (lane >> 2)) * kScoreStride + kSumColumn] = total;
    if (lane < kRows) scores[(warp() * kRows + lane) * kScoreStride + kMaximumColumn] = maximum_;
    __syncthreads();
    const bool partial = segment.slot >= 0;
    if (thread < kTileRows) {
      const float maximum = scores[thread * kScoreStride + kMaximumColumn];
      const float sum = scores[thread * kScoreStride + kSumColumn];
      if (partial) {
        args.stats[static_cast<int64_t>(segment.slot) * kTileRows + thread] = make_float2(maximum, sum);
      } else if (thread < rows_in_tile(args, segment.row_tile)) {
        const RowPlace place = place_row(args.p, segment.request, segment.row_tile * args.useful_rows + thread);
        args.p.lse[place.token * args.p.heads + place.head] = sum == 0.f ? -INFINITY : (maximum + log2f(sum)) * kLn2;
      }
    }
    if (partial) {
      store_partial(args.partials + static_cast<int64_t>(segment.slot) * (kTileRows * kLatent));
    } else {
      store_output(args, segment, scores);
    }
  }

 private:
  static __device__ __forceinline__ int warp() { return threadIdx.x >> 5; }

  __device__ __forceinline__ void rescale_rows(const float* scores) {
    const int lane = threadIdx.x & 31;
    if (warp() < kBlocks) sum_ *= scores[(8 * warp() + (lane >> 2)) * kScoreStride + kFactorColumn];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float* factor = scores + (8 * n + 2 * (lane & 3)) * kScoreStride + kFactorColumn;
      const float even = factor[0];
      const float odd = factor[kScoreStride];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        out_[m][n][0] *= even;
        out_[m][n][1] *= odd;
        out_[m][n][2] *= even;
        out_[m][n][3] *= odd;
      }
    }
  }

  // Adds the weights, as rounded, of row 8 * warp + lane / 4 at eight of the tile's keys: lanes of a quad share a row.
  __device__ __forceinline__ void add_weights(uint32_t weights, int lane) {
    uint32_t d[4];
    ldmatrix_x4(d, weights + (8 * warp() + (lane & 7)) * kScoreStrideBytes + ((lane >> 3) << 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) sum_ += __uint_as_float(d[i] << 16) + __uint_as_float(d[i] & 0xffff0000u);
  }

  // B fragments of P^T: 16 keys of all rows.
  static __device__ __forceinline__ void load_weights(uint32_t (&p)[kBlocks][2], uint32_t weights, int lane) {
    const uint32_t base =
        weights + ((lane & 7) + ((lane >> 4) << 3)) * kScoreStrideBytes + (((lane >> 3) & 1) << 4);
#pragma unroll
    for (int n = 0; n + 1 < kBlocks; n += 2) {
      uint32_t d[4];
      ldmatrix_x4(d, base + 8 * n * kScoreStrideBytes);
      p[n][0] = d[0];
      p[n][1] = d[1];
      p[n + 1][0] = d[2];
      p[n + 1][1] = d[3];
    }
    if (kBlocks % 2 == 1) {
      constexpr int kLast = kBlocks - 1;
      const uint32_t last = weights + (8 * kLast + (lane & 7)) * kScoreStrideBytes + (((lane >> 3) & 1) << 4);
      ldmatrix_x2(p[kLast][0], p[kLast][1], last);
    }
  }

  // Fragment order: [warp][m][n][lane] of four floats, so that stores and the merge's loads are contiguous.
  __device__ __forceinline__ void store_partial(float* target) const {
    auto* base = reinterpret_cast<float4*>(target) + warp() * 4 * kBlocks * 32 + (threadIdx.x & 31);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float(&v)[4] = out_[m][n];
        base[(m * kBlocks + n) * 32] = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }

  __device__ __forceinline__ void store_output(const PortableArgs& args, const Segment& segment, const float* scores) {
    const TreeAttentionParams& p = args.p;
    const int lane = threadIdx.x & 31;
    const int rows = rows_in_tile(args, segment.row_tile);
    const int column = warp() * 64 + (lane >> 2);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      __nv_bfloat16* targets[2];
      float inverse[2];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int row = 8 * n + 2 * (lane & 3) + odd;
        const float sum = scores[row * kScoreStride + kSumColumn];
        inverse[odd] = sum == 0.f ? 0.f : 1.f / sum;
        targets[odd] = nullptr;
        if (row < rows) {
          const RowPlace place = place_row(p, segment.request, segment.row_tile * args.useful_rows + row);
          targets[odd] = static_cast<__nv_bfloat16*>(p.out) + place.token * p.out_token_stride +
                         place.head * p.out_head_stride;
        }
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float(&v)[4] = out_[m][n];
        const float scaled[4] = {v[0] * inverse[0], v[1] * inverse[1], v[2] * inverse[0], v[3] * inverse[1]};
        store_fragment(targets[0], targets[1], column + 16 * m, scaled);
      }
    }
  }

  uint32_t query_[kChunkGroups][kBlocks][2];  // B fragments of Q^T
  float out_[4][kBlocks][4];                  // O^T: 16 latent columns x 8 rows each
  float maximum_;                             // lane i: row kTileRows / 8 * warp + i, base 2
  float sum_;                                 // row 8 * warp + lane / 4, this lane's share
};

// Bit i: may row `first_row` + i of the request see key `key`? All ones for a prefix key.
template <int kRows>
__device__ __forceinline__ uint32_t visible_rows(const PortableArgs& args, const Segment& segment, int tile) {
  if ((tile + 1) * kTileKeys <= segment.prefix) return 0xffffffffu;
  const int column = tile * kTileKeys + static_cast<int>(threadIdx.x & 31) - segment.prefix;
  if (column < 0) return 0xffffffffu;
  const int first = segment.row_tile * args.useful_rows + static_cast<int>(threadIdx.x >> 5) * kRows;
  return rows_that_see(args.p, segment.request, segment.prefix, first, kRows, column);
}

template <class Config>
__device__ __forceinline__ void run_phased(const PortableArgs& args, const uint8_t* parked, RowTile<Config>& rows,
                                           TileLoader& loader, uint32_t stages, float* scores) {
  constexpr int kAhead = Config::kStages - 1;
  const Segment first = resume<Segment>(parked, kScoreStrideBytes);
#pragma unroll
  for (int ahead = 1; ahead < kAhead; ++ahead) {
    loader.request(args, first, first.tile_begin + ahead, stages + ahead * kTileBytes);
  }
  uint32_t stage = stages;
  uint32_t free_stage = stages + kAhead * kTileBytes;
  int tile = first.tile_begin;
  bool more = true;
  while (more) {
    cp_async_wait<kAhead - 1>();
    __syncthreads();  // the tile is complete for all; all have left the tile before, its stage and its weights
    uint32_t visible;
    {
      const Segment segment = resume<Segment>(parked, kScoreStrideBytes);
      loader.request(args, segment, tile + kAhead, free_stage);
      visible = visible_rows<Config::kTileRows / 8>(args, segment, tile);
      more = ++tile < segment.tile_end;
    }
    rows.score(stage, scores);
    __syncthreads();
    const bool grew = rows.softmax(scores, visible, args.p.scale * kLog2e);
    const bool rescale = __syncthreads_or(grew);
    rows.accumulate(stage, scores, rescale);
    free_stage = stage;
    stage = stage == stages + kAhead * kTileBytes ? stages : stage + kTileBytes;
  }
}

template <class Config>
__device__ __forceinline__ void run_pipelined(const PortableArgs& args, const uint8_t* parked, RowTile<Config>& rows,
                                              TileLoader& loader, uint32_t stages, float* scores) {
  const Segment first = resume<Segment>(parked, kScoreStrideBytes);
  int tile = first.tile_begin;
  int step = 0;  // tiles begun
  int left = first.tile_end - first.tile_begin + 2;
  uint32_t visible = 0xffffffffu;  // of the tile whose scores were computed last
  bool grew = false;
  int stage = 0, buffer = 0;  // of tile j; j - 1 and j - 2 follow cyclically
  for (; left > 0; --left) {
    cp_async_wait<0>();
    const bool rescale = __syncthreads_or(grew);  // tile j complete, scores j - 1 and weights j - 2 written
    const uint32_t visible_before = visible;
    {
      const Segment segment = resume<Segment>(parked, kScoreStrideBytes);
      loader.request(args, segment, tile + 1, stages + ((stage + 1) & 3) * kTileBytes);
      if (left > 2) visible = visible_rows<Config::kTileRows / 8>(args, segment, tile);
      ++tile;
    }
    const int before = buffer == 0 ? 2 : buffer - 1;
    const int next = buffer == 2 ? 0 : buffer + 1;  // also two before
    if (left > 2) rows.score(stages + stage * kTileBytes, scores + buffer * Config::kScoreWords);
    grew = false;
    if (step >= 1 && left > 1) {
      grew = rows.softmax(scores + before * Config::kScoreWords, visible_before, args.p.scale * kLog2e);
    }
    if (step >= 2) {
      rows.accumulate(stages + ((stage + 2) & 3) * kTileBytes, scores + next * Config::kScoreWords, rescale);
    }
    step = step < 2 ? step + 1 : 2;
    stage = (stage + 1) & 3;
    buffer = next;
  }
}

// Row 0..2 of slice 1's padding hold the schedule's cursor, the next two the segment.
template <class Config>
__global__ void __launch_bounds__(kThreads, 1)
    smxx_bf16_tree_attention_portable(const __grid_constant__ PortableArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t stages = shared_address(shared);
  auto* scores = reinterpret_cast<float*>(shared + Config::kStages * kTileBytes);
  auto* parked_cursor = reinterpret_cast<uint8_t*>(scores + Config::kTileRows * kScoreStride + kParkColumn);
  uint8_t* parked_segment = parked_cursor + 3 * kScoreStrideBytes;
  allow_dependent_launch();
  if (threadIdx.x == 0 && args.granule == 0) args.merge[blockIdx.x] = MergeEntry{0, 0, 0, 0};
  Schedule schedule(args);
  Segment segment;
  RowTile<Config> rows;
  while (schedule.next(args, segment)) {
    if (segment.slot >= args.slots) __trap();  // lengths beyond the bound that the workspace was sized for
    if (threadIdx.x == 0 && segment.tile_begin == 0) {
      const int count = schedule.partials_of_item(args, segment);
      const int entry = args.granule ? segment.request * args.row_tiles + segment.row_tile : static_cast<int>(blockIdx.x);
      if (args.granule || count > 1) args.merge[entry] = MergeEntry{segment.request, segment.row_tile, count, segment.slot};
    }
    TileLoader loader;
    loader.prefetch_slot(args, segment, segment.tile_begin);
    RowTile<Config>::request_queries(args, segment, stages + kTileBytes);
    loader.request(args, segment, segment.tile_begin, stages);
    cp_async_wait<1>();
    __syncthreads();
    rows.load_queries(stages + kTileBytes);
    rows.clear();
    __syncthreads();  // the queries' place is free again
    park(schedule.cursor(), parked_cursor, kScoreStrideBytes);
    park(segment, parked_segment, kScoreStrideBytes);
    __syncthreads();
    if constexpr (Config::kPipelined) {
      run_pipelined<Config>(args, parked_segment, rows, loader, stages, scores);
    } else {
      run_phased<Config>(args, parked_segment, rows, loader, stages, scores);
    }
    rows.finish(args, resume<Segment>(parked_segment, kScoreStrideBytes), scores);
    schedule = Schedule(resume<Cursor>(parked_cursor, kScoreStrideBytes));
    __syncthreads();  // before the next segment's queries overwrite what was read here
  }
  cp_async_wait<0>();
}

}  // namespace treeverify
