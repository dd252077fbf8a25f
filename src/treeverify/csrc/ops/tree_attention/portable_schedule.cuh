// Who computes what in the portable kernel: decided on the device from kv_indptr, so a captured graph follows lengths.
//
// An *item* is (request, row tile); its keys, P prefix rows and then the draft rows, are cut into key tiles. A *unit* is
// one key tile of an item (balanced mode) or one split of `granule` key tiles (fixed-split mode). Units are numbered
// request by request, row tile by row tile, in key order, and every CTA takes a contiguous range of nearly equal size.
//
// Balanced mode: the part of an item that falls to one CTA is one *segment*. A segment that is not a whole item leaves a
// partial result in one of its CTA's two slots: slot 2c if it continues an item that an earlier CTA began, else
// slot 2c + 1. (Only a CTA's first segment can be the former and only its last the latter.) The merge entry of CTA c
// describes the item that c begins and does not finish, if there is one.
// Fixed-split mode: each unit is a segment of its own with a slot of its own, the cut depends on the request's length
// alone, and the merge entry of an item is written by whoever computes its first split.
//
// Every warp runs the plan for itself: no shared memory and no barrier.
#pragma once

#include <cstdint>

#include "device/mask.cuh"
#include "ops/tree_attention/params.h"

namespace treeverify {

constexpr int kTileKeys = 32;

// What the merge kernel must do: sum `count` partials, the first in slot `first`, the others from slot `next` on.
struct alignas(16) MergeEntry {
  int32_t request;
  int32_t row_tile;
  int32_t count;  // below 2: nothing to do
  int32_t first;
};

struct PortableArgs {
  TreeAttentionParams p;
  int32_t row_tiles;     // per request
  int32_t useful_rows;   // rows of a row tile that are really (node, head) pairs; the last tile may have fewer
  int32_t granule;       // key tiles per split in fixed-split mode; 0 = balanced mode
  int32_t min_units;     // balanced mode: no CTA takes fewer units, so that short prefixes are not cut to dust
  int32_t slots;         // partial slots that the workspace holds
  int32_t entries;       // merge entries that the workspace holds
  MergeEntry* merge;     // [entries]
  float2* stats;         // [slots, tile rows]: maximum (base 2) and sum of weights
  float* partials;       // [slots, tile rows * kLatent] in fragment order, see portable_kernel.cuh
};

struct alignas(16) Segment {
  int request;
  int row_tile;
  int prefix;       // P of the request
  int tile_begin;   // key tiles, end exclusive
  int tile_end;
  int slot;         // -1: the segment is a whole item and its result goes straight to the output
  int64_t begin;    // of the request, in kv_indices
};

__device__ __forceinline__ int prefix_length(const TreeAttentionParams& p, int request) {
  return static_cast<int>(load_integer(p.kv_indptr, p.indptr_is_64, request + 1) -
                          load_integer(p.kv_indptr, p.indptr_is_64, request));
}

__device__ __forceinline__ int tiles_of(const PortableArgs& args, int prefix) {
  return (prefix + args.p.nodes + kTileKeys - 1) / kTileKeys;
}

__device__ __forceinline__ int units_of(const PortableArgs& args, int tiles) {
  return args.granule == 0 ? tiles : (tiles + args.granule - 1) / args.granule;
}

// Where the schedule of a CTA stands.
struct alignas(16) Cursor {
  int64_t unit;       // next unit of this CTA
  int64_t end;        // exclusive
  int64_t units;      // of the whole call
  int64_t offset;     // of `unit` within its request, over all its row tiles
  int ctas;           // CTAs that have work
  int request;
  int prefix;
  int request_units;  // per row tile
};

// Registers are scarce while a segment runs, so what only its ends need waits in shared memory: 16 bytes in each of
// several rows, `stride` bytes apart. One thread parks, all resume; a barrier must stand between.
template <class T>
__device__ __forceinline__ void park(const T& value, uint8_t* place, int stride) {
  static_assert(sizeof(T) % 16 == 0);
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 16); ++i) {
    *reinterpret_cast<uint4*>(place + i * stride) = reinterpret_cast<const uint4*>(&value)[i];
  }
}

template <class T>
__device__ __forceinline__ T resume(const uint8_t* place, int stride) {
  T value;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 16); ++i) {
    reinterpret_cast<uint4*>(&value)[i] = *reinterpret_cast<const uint4*>(place + i * stride);
  }
  return value;
}

class Schedule {
 public:
  __device__ __forceinline__ explicit Schedule(const Cursor& at) : at_(at) {}
  __device__ __forceinline__ const Cursor& cursor() const { return at_; }

  __device__ __forceinline__ explicit Schedule(const PortableArgs& args) {
    const int lane = threadIdx.x & 31;
    const int per_lane = (args.p.batch + 31) / 32;
    const int first = lane * per_lane;
    const int last = min(first + per_lane, args.p.batch);
    int64_t own = 0;  // units of one row tile, over this lane's requests
    for (int request = first; request < last; ++request) {
      own += units_of(args, tiles_of(args, prefix_length(args.p, request)));
    }
    int64_t through = own;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t below = __shfl_up_sync(0xffffffffu, through, distance);
      if (lane >= distance) through += below;
    }
    at_.units = __shfl_sync(0xffffffffu, through, 31) * args.row_tiles;
    const int64_t wish = (at_.units + args.min_units - 1) / args.min_units;
    at_.ctas = static_cast<int>(wish < gridDim.x ? wish : gridDim.x);
    const int cta = static_cast<int>(blockIdx.x);
    at_.unit = cta < at_.ctas ? boundary(cta) : at_.units;
    at_.end = cta < at_.ctas ? boundary(cta + 1) : at_.units;
    find_request(args, own, through, first, last);
  }

  // The next segment of this CTA; false when there is none. CTA-uniform.
  __device__ __forceinline__ bool next(const PortableArgs& args, Segment& segment) {
    if (at_.unit >= at_.end) return false;
    if (at_.offset == at_.request_units * args.row_tiles) {
      at_.offset = 0;
      load_request(args, at_.request + 1);
    }
    const int row_tile = static_cast<int>(at_.offset / at_.request_units);
    const int begin = static_cast<int>(at_.offset - static_cast<int64_t>(row_tile) * at_.request_units);
    const int64_t left = at_.end - at_.unit;
    const int rest = at_.request_units - begin;
    const int take = args.granule ? 1 : static_cast<int>(left < rest ? left : rest);
    const int scale = args.granule ? args.granule : 1;
    segment.request = at_.request;
    segment.row_tile = row_tile;
    segment.prefix = at_.prefix;
    segment.begin = load_integer(args.p.kv_indptr, args.p.indptr_is_64, at_.request);
    segment.tile_begin = begin * scale;
    segment.tile_end = min((begin + take) * scale, tiles_of(args, at_.prefix));
    if (take == at_.request_units) {
      segment.slot = -1;
    } else if (args.granule) {
      segment.slot = static_cast<int>(at_.unit);
    } else {
      segment.slot = 2 * static_cast<int>(blockIdx.x) + (begin == 0);
    }
    at_.unit += take;
    at_.offset += take;
    return true;
  }

  // Partials of the item that `segment` (as just returned by next) begins.
  __device__ __forceinline__ int partials_of_item(const PortableArgs& args, const Segment& segment) const {
    if (args.granule) return at_.request_units;
    if (segment.slot < 0) return 1;
    const int64_t last_unit = at_.unit - segment.tile_end + at_.request_units - 1;
    int last_cta = static_cast<int>((last_unit * at_.ctas) / at_.units);
    while (boundary(last_cta + 1) <= last_unit) ++last_cta;
    while (boundary(last_cta) > last_unit) --last_cta;
    return last_cta - static_cast<int>(blockIdx.x) + 1;
  }

 private:
  __device__ __forceinline__ int64_t boundary(int cta) const { return cta * at_.units / at_.ctas; }

  __device__ __forceinline__ void load_request(const PortableArgs& args, int request) {
    at_.request = request;
    at_.prefix = prefix_length(args.p, request);
    at_.request_units = units_of(args, tiles_of(args, at_.prefix));
  }

  // Finds the request that holds at_.unit: the lane whose block of requests contains it walks that block.
  __device__ __forceinline__ void find_request(const PortableArgs& args, int64_t own, int64_t through, int first,
                                               int last) {
    const uint32_t beyond = __ballot_sync(0xffffffffu, through * args.row_tiles > at_.unit);
    const int owner = beyond == 0 ? 0 : __ffs(static_cast<int>(beyond)) - 1;
    int64_t offset = at_.unit - (through - own) * args.row_tiles;
    int request = first;
    if (beyond != 0 && (static_cast<int>(threadIdx.x) & 31) == owner) {
      for (; request < last; ++request) {
        const int64_t units =
            static_cast<int64_t>(units_of(args, tiles_of(args, prefix_length(args.p, request)))) * args.row_tiles;
        if (offset < units) break;
        offset -= units;
      }
    }
    __syncwarp();
    at_.offset = __shfl_sync(0xffffffffu, offset, owner);
    load_request(args, __shfl_sync(0xffffffffu, request, owner));
  }

  Cursor at_;
};

}  // namespace treeverify
