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
//   softmax: every thread weighs kTileRows / 8 scores, whatever their row (softmax.cuh).
//   O^T: warp w owns latent columns 64w .. 64w + 63 of all rows; the accumulator stays in registers.
//
// KV rows are gathered by cp.async, eight threads to a row, 128 bytes at a time; draft rows follow the prefix in the
// same key order. Keys beyond the end, and draft rows that no node sees, are filled with zeros: no NaN can come from
// them. Scores of draft keys that a row does not see are replaced by -inf.
//
// Tile by tile: wait | S | softmax | O, three barriers; kStages - 1 tiles in flight.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>

#include "device/mask.cuh"
#include "device/ptx.cuh"
#include "device/softmax.cuh"
#include "device/swizzle.cuh"
#include "ops/tree_attention/portable_rows.cuh"
#include "ops/tree_attention/portable_schedule.cuh"

namespace treeverify {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kShortPrefix = 8192;  // up to here few keys may dominate

template <int kTileRows_, int kStages_>
struct PortableConfig {
  static constexpr int kTileRows = kTileRows_;
  static constexpr int kStages = kStages_;
  using Softmax = TileSoftmax<kTileRows>;
  static constexpr int kScoreOffset = kStages * kTileBytes;
  static constexpr int kWeightOffset = kScoreOffset + Softmax::kScoreBytes;
  static constexpr int kFactorOffset = kWeightOffset + Softmax::kWeightBytes;
  static constexpr int kSharedBytes = kFactorOffset + Softmax::kFactorBytes;
  static_assert(kTileRows % 8 == 0 && kStages >= 2);
  static_assert(Softmax::kTotalsBytes <= Softmax::kScoreBytes);
  // Q is staged behind the first KV tile, across whatever follows.
  static_assert(kTileBytes + kTileRows * kRowBytes <= kSharedBytes);
};

// Gathers KV tiles, one after the other. Thread t copies chunks t % 8, t % 8 + 8, ... of row t / 8. The slot of the tile
// after the one being requested is already on its way, so that a gather never waits for its index.
class TileLoader {
 public:
  __device__ __forceinline__ void start(const PortableArgs& args, const Segment& segment) {
    const int width = args.p.indices_is_64 ? 8 : 4;
    const int thread = cold_thread();
    const int row = thread >> 3;
    target_ = opaque(swizzled_offset(row, thread & 7));
    index_ = static_cast<const uint8_t*>(args.p.kv_indices) +
             (segment.begin + static_cast<int64_t>(segment.tile_begin) * kTileKeys + row) * width;
    if (segment.tile_begin * kTileKeys + row < segment.prefix) prefetch();
  }

  // Requests a tile that lies, like the one after it, inside the prefix.
  __device__ __forceinline__ void request_inside(const PortableArgs& args, uint32_t stage) {
    const auto* source = static_cast<const __nv_bfloat16*>(args.p.kv_pool) + slot_ * args.p.pool_stride;
    copy<true>(source, stage, true);
    index_ += args.p.indices_is_64 ? 8 * kTileKeys : 4 * kTileKeys;
    prefetch();
    cp_async_commit();
  }

  // Requests `tile`, whose turn it is. Commits one group, empty at the end.
  __device__ __forceinline__ void request(const PortableArgs& args, const Segment& segment, int tile, uint32_t stage) {
    if (tile < segment.tile_end) {
      const TreeAttentionParams& p = args.p;
      const int column = tile * kTileKeys + (cold_thread() >> 3) - segment.prefix;
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
      copy<false>(source, stage, wanted);
      index_ += p.indices_is_64 ? 8 * kTileKeys : 4 * kTileKeys;
      if (tile + 1 < segment.tile_end && column + kTileKeys < 0) prefetch();
    }
    cp_async_commit();
  }

 private:
  // Slots are below 2^31 (that many rows would be 2.5 TB), so of a 64-bit index the low word is all.
  __device__ __forceinline__ void prefetch() { slot_ = *reinterpret_cast<const int32_t*>(index_); }

  template <bool kAll>
  __device__ __forceinline__ void copy(const __nv_bfloat16* source, uint32_t stage, bool wanted) const {
    const int chunk = threadIdx.x & 7;
    const uint32_t target = stage + target_;
    source = opaque(source + chunk * 8);
#pragma unroll
    for (int group = 0; group < kChunkGroups; ++group) {
      if (kAll) {
        cp_async_16(target + group * 128, source + group * 64);
      } else {
        cp_async_16(target + group * 128, source + group * 64, wanted);
      }
    }
  }

  uint32_t target_;       // of this thread's first chunk, in a stage
  const uint8_t* index_;  // of the tile that slot_ belongs to
  int slot_ = 0;          // products with the stride are 64-bit
};

// Bit i: may this thread's score i of `tile` count? All ones inside the prefix.
template <int kTileRows>
__device__ __forceinline__ uint32_t visible_scores(const PortableArgs& args, const Segment& segment, int tile) {
  if ((tile + 1) * kTileKeys <= segment.prefix) return 0xffffffffu;
  uint32_t visible = 0;
#pragma unroll 1
  for (int i = 0; i < kTileRows / 8; ++i) {
    int row, key;
    TileSoftmax<kTileRows>::locate(cold_thread(), i, row, key);
    const int column = tile * kTileKeys + key - segment.prefix;
    if (row_sees(args.p, segment.request, segment.prefix, segment.row_tile * args.useful_rows + row, column)) {
      visible |= 1u << i;
    }
  }
  return visible;
}

// Tiles from `tile` on whose successors up to `ahead` lie inside the prefix and the segment.
__device__ __forceinline__ int tiles_inside(const Segment& segment, int tile, int ahead) {
  return max(0, min(segment.tile_end, segment.prefix / kTileKeys) - ahead - tile);
}

// A segment, from its queries in registers and its first tile requested to the sums in registers.
template <class Config>
__device__ __forceinline__ void run_segment(const PortableArgs& args, uint32_t lanes, RowTile<Config::kTileRows>& rows,
                                            TileLoader& loader, uint8_t* shared) {
  constexpr int kAhead = Config::kStages - 1;
  const uint32_t stages = shared_address(shared);
  uint8_t* scores = shared + Config::kScoreOffset;
  uint8_t* weights = shared + Config::kWeightOffset;
  uint8_t* factors = shared + Config::kFactorOffset;
  const float scale = args.p.scale * kLog2e;
  uint32_t stage = stages;
  uint32_t free_stage = stages + kAhead * kTileBytes;
  int left, inside;
  {
    const Segment segment = resume<Segment, 0>(lanes);
#pragma unroll
    for (int ahead = 1; ahead < kAhead; ++ahead) {
      loader.request(args, segment, segment.tile_begin + ahead, stages + ahead * kTileBytes);
    }
    left = segment.tile_end - segment.tile_begin;
    inside = left - tiles_inside(segment, segment.tile_begin, kAhead + 1);
  }
#pragma unroll 1
  for (; left > 0; --left) {
    uint32_t visible = 0xffffffffu;
    cp_async_wait<kAhead - 1>();
    __syncthreads();  // the tile is complete for all; all have left the tile before, its stage and its weights
    if (__builtin_expect(left > inside, true)) {
      loader.request_inside(args, free_stage);
    } else {
      const Segment segment = resume<Segment, 0>(lanes);
      const int tile = segment.tile_end - left;
      loader.request(args, segment, tile + kAhead, free_stage);
      visible = visible_scores<Config::kTileRows>(args, segment, tile);
    }
    rows.score(stage, scores);
    __syncthreads();
    const bool raised = rows.softmax.weigh(scores, weights, factors, visible, scale);
    if (__syncthreads_or(raised)) rows.rescale(factors);
    rows.accumulate(stage, shared_address(weights));
    free_stage = stage;
    stage = stage == stages + kAhead * kTileBytes ? stages : stage + kTileBytes;
  }
}

template <class Config>
__global__ void __launch_bounds__(kThreads, 1)
    smxx_bf16_tree_attention_portable(const __grid_constant__ PortableArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kCursor = sizeof(Segment) / 4;  // first lane
  const uint32_t stages = shared_address(shared);
  allow_dependent_launch();
  if (threadIdx.x == 0 && args.granule == 0) args.merge[blockIdx.x] = MergeEntry{0, 0, 0, 0};
  Schedule schedule(args);
  Segment segment;
  RowTile<Config::kTileRows> rows;
  uint32_t lanes = 0;
  rows.place();
  while (schedule.next(args, segment)) {
    if (segment.slot >= args.slots) __trap();  // lengths beyond the bound that the workspace was sized for
    TileLoader loader;
    loader.start(args, segment);
    RowTile<Config::kTileRows>::request_queries(args, segment, stages + kTileBytes);
    loader.request(args, segment, segment.tile_begin, stages);
    if (threadIdx.x == 0 && segment.tile_begin == 0) {
      const int count = schedule.partials_of_item(args, segment);
      const int entry = args.granule ? segment.request * args.row_tiles + segment.row_tile : static_cast<int>(blockIdx.x);
      if (args.granule || count > 1) args.merge[entry] = MergeEntry{segment.request, segment.row_tile, count, segment.slot};
    }
    park<Segment, 0>(segment, lanes);
    park<Cursor, kCursor>(schedule.cursor(), lanes);
    cp_async_wait<1>();
    __syncthreads();
    rows.load_queries(stages + kTileBytes);
    rows.clear(segment.prefix <= kShortPrefix ? kSmallSlack : kSlack);
    __syncthreads();  // the queries' place is free again
    run_segment<Config>(args, lanes, rows, loader, shared);
    rows.finish(args, resume<Segment, 0>(lanes), shared + Config::kScoreOffset);
    schedule = Schedule(resume<Cursor, kCursor>(lanes));
    __syncthreads();  // before the next segment's queries overwrite what was read here
  }
  cp_async_wait<0>();
}

}  // namespace treeverify
