// Who computes what in the portable kernel: decided on the device from kv_indptr, so a captured graph follows lengths.
//
// An *item* is (request, row tile); its keys, P prefix rows and then the draft rows, are cut into key tiles. A *unit* is
// one key tile of an item (balanced mode) or one split of `granule` key tiles (fixed-split mode). Items are numbered
// request by request, units item by item in key order.
//
// Balanced mode, in this order:
//   waves: with more items than CTAs and lengths that are nearly equal, CTA c takes the whole items c, c + CTAs, ..,
//          so that neighbours read the same keys at the same time;
//   parts: if the items left are fewer than the CTAs and the longest part exceeds an even share by no more than another
//          segment costs, each is cut into as many equal parts as its length earns and every CTA takes one part;
//   cut:   otherwise every CTA takes a contiguous range of the units left, of nearly equal size.
// What falls to one CTA of one item is a *segment*. A segment that is not a whole item leaves a partial result in one of
// its CTA's two slots: slot 2c if it continues an item that an earlier CTA began, else slot 2c + 1. (Only the first
// segment after the waves can be the former and only the last the latter.) The merge entry of CTA c describes the item
// that c begins and does not finish, if there is one.
// Fixed-split mode: each unit is a segment of its own with a slot of its own, the cut depends on the request's length
// alone, and the merge entry of an item is written by whoever computes its first split.
//
// Every warp runs the plan for itself: no shared memory and no barrier.
#pragma once

#include <cstdint>
#include <cstring>

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
  bool allow_parts;      // balanced mode: may items be cut into parts?
  int32_t slots;         // partial slots that the workspace holds
  int32_t entries;       // merge entries that the workspace holds
  MergeEntry* merge;     // [entries]
  float2* stats;         // [slots, tile rows]: maximum (base 2) and sum of weights
  float* partials;       // [slots, tile rows * kLatent] in fragment order, see portable_kernel.cuh
};

struct Segment {
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

// Where the schedule of a CTA stands, after the waves: units and offsets count from the first item that is in no wave.
struct Cursor {
  int64_t unit;       // next unit of this CTA
  int64_t end;        // exclusive
  int64_t offset;     // of `unit` within its request, over all its row tiles that are in no wave
  int quotient;       // of the units by the CTAs that share them evenly
  int remainder;
  int parts;          // CTAs that share this CTA's item; 0 if the units are cut evenly
  int wave, waves;    // the next and their number
  int request;
  int prefix;
  int request_units;  // per row tile
};

// Registers are scarce while a segment runs. What only its ends need waits spread over the lanes of every warp, one word
// a lane: a single register.
template <class T, int kFirst>
__device__ __forceinline__ void park(const T& value, uint32_t& lanes) {
  constexpr int kWords = static_cast<int>(sizeof(T) / 4);
  static_assert(sizeof(T) % 4 == 0 && kFirst + kWords <= 32);
  const int lane = threadIdx.x & 31;
  uint32_t words[kWords];
  memcpy(words, &value, sizeof(T));
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if (lane == kFirst + i) lanes = words[i];
  }
}

template <class T, int kFirst>
__device__ __forceinline__ T resume(uint32_t lanes) {
  constexpr int kWords = static_cast<int>(sizeof(T) / 4);
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __shfl_sync(0xffffffffu, lanes, kFirst + i);
  T value;
  memcpy(&value, words, sizeof(T));
  return value;
}

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

class Schedule {
 public:
  __device__ __forceinline__ explicit Schedule(const Cursor& at) : at_(at) {}
  __device__ __forceinline__ const Cursor& cursor() const { return at_; }

  __device__ __forceinline__ explicit Schedule(const PortableArgs& args) {
    const int lane = threadIdx.x & 31;
    const int per_lane = (args.p.batch + 31) / 32;
    const int first = min(lane * per_lane, args.p.batch);
    const int last = min(first + per_lane, args.p.batch);
    const int ctas = static_cast<int>(gridDim.x);
    const int items = args.p.batch * args.row_tiles;
    const int own_units = first < last ? units_of(args, tiles_of(args, prefix_length(args.p, first))) : 0;
    const auto units_at = [&](int request) {
      return request == first ? own_units : units_of(args, tiles_of(args, prefix_length(args.p, request)));
    };
    at_.wave = at_.waves = at_.parts = 0;
    int own_longest = 0;
    int64_t own = 0;  // units of one row tile
#pragma unroll 1
    for (int request = first; request < last; ++request) {
      const int units = units_at(request);
      own += units;
      own_longest = max(own_longest, units);
    }
    if (args.granule == 0 && items > ctas) {
      const int longest = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned>(own_longest)));
      const int64_t even = warp_sum(own) * args.row_tiles / ctas;
      const int waves = items / ctas;
      const int64_t rest = static_cast<int64_t>(items - waves * ctas) * longest / ctas;
      if (static_cast<int64_t>(waves) * longest + rest <= even + even / 32 + kSegmentCost) at_.waves = waves;
    }
    const int first_item = at_.waves * ctas;
    const auto row_tiles_at = [&](int request) { return row_tiles_left(args, request, first_item); };
    own = 0;
#pragma unroll 1
    for (int request = first; request < last; ++request) {
      own += static_cast<int64_t>(units_at(request)) * row_tiles_at(request);
    }
    int64_t through = scan(own);
    const int64_t units = __shfl_sync(0xffffffffu, through, 31);  // of all CTAs
    const int64_t wish = (units + args.min_units - 1) / args.min_units;
    int sharing = static_cast<int>(wish < ctas ? wish : ctas);
    const int cta = static_cast<int>(blockIdx.x);
    int share = 0;  // of an item per CTA, if the items are cut into parts
    if (args.granule == 0 && args.allow_parts && items - first_item <= ctas && units > 0) {
      const int even = max(args.min_units, static_cast<int>((units + ctas - 1) / ctas));
      int counts[kCandidates] = {};
#pragma unroll 1
      for (int request = first; request < last; ++request) {
        const int units = units_at(request), row_tiles = row_tiles_at(request);
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) counts[i] += row_tiles * ((units + even + i - 1) / (even + i));
      }
#pragma unroll
      for (int i = kCandidates - 1; i >= 0; --i) {
        const int count = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(counts[i])));
        if (count <= ctas) {
          share = even + i;
          sharing = count;
        }
      }
    }
    const auto weight = [&](int request) {
      const int units = units_at(request);
      return static_cast<int64_t>(share > 0 ? (units + share - 1) / share : units) * row_tiles_at(request);
    };
    if (share > 0) {
      own = 0;
#pragma unroll 1
      for (int request = first; request < last; ++request) own += weight(request);
      through = scan(own);
    }
    at_.quotient = sharing == 0 ? 0 : static_cast<int>(units / sharing);
    at_.remainder = sharing == 0 ? 0 : static_cast<int>(units - static_cast<int64_t>(at_.quotient) * sharing);
    // The request that holds this CTA's first unit, or its part.
    at_.unit = share > 0 ? cta : boundary(cta);
    const uint32_t beyond = __ballot_sync(0xffffffffu, through > at_.unit);
    const int owner = beyond == 0 || cta >= sharing ? 0 : __ffs(static_cast<int>(beyond)) - 1;
    int64_t offset = at_.unit - (through - own);
    int request = first;
    if (beyond != 0 && lane == owner) {
#pragma unroll 1
      for (; request + 1 < last; ++request) {
        if (offset < weight(request)) break;
        offset -= weight(request);
      }
    }
    __syncwarp();
    at_.offset = __shfl_sync(0xffffffffu, offset, owner);
    load_request(args, __shfl_sync(0xffffffffu, request, owner));
    if (cta >= sharing) {
      at_.unit = at_.end = 0;
    } else if (share > 0) {
      const int units = at_.request_units;
      at_.parts = (units + share - 1) / share;
      const int row_tile = static_cast<int>(at_.offset) / at_.parts;
      const int part = static_cast<int>(at_.offset) - row_tile * at_.parts;
      const int begin = static_cast<int>(static_cast<int64_t>(units) * part / at_.parts);
      at_.offset = static_cast<int64_t>(row_tile) * units + begin;
      at_.unit = 0;
      at_.end = static_cast<int64_t>(units) * (part + 1) / at_.parts - begin;
    } else {
      at_.end = boundary(cta + 1);
    }
  }

  // The next segment of this CTA; false when there is none. CTA-uniform.
  __device__ __forceinline__ bool next(const PortableArgs& args, Segment& segment) {
    int units, begin, take;
    const bool wave = at_.wave < at_.waves;
    if (wave) {
      const int item = static_cast<int>(blockIdx.x) + at_.wave++ * static_cast<int>(gridDim.x);
      segment.request = item / args.row_tiles;
      segment.row_tile = item - segment.request * args.row_tiles;
      segment.prefix = prefix_length(args.p, segment.request);
      units = take = tiles_of(args, segment.prefix);
      begin = 0;
    } else {
      if (at_.unit >= at_.end) return false;
      const int first_item = at_.waves * static_cast<int>(gridDim.x);
      if (at_.offset == static_cast<int64_t>(at_.request_units) * row_tiles_left(args, at_.request, first_item)) {
        at_.offset = 0;
        load_request(args, at_.request + 1);
      }
      const int row_tile = static_cast<int>(at_.offset / at_.request_units);
      begin = static_cast<int>(at_.offset - static_cast<int64_t>(row_tile) * at_.request_units);
      const int64_t left = at_.end - at_.unit;
      units = at_.request_units;
      take = args.granule ? 1 : static_cast<int>(left < units - begin ? left : units - begin);
      segment.request = at_.request;
      segment.row_tile = row_tile + args.row_tiles - row_tiles_left(args, at_.request, first_item);
      segment.prefix = at_.prefix;
    }
    const int scale = args.granule ? args.granule : 1;
    segment.begin = load_integer(args.p.kv_indptr, args.p.indptr_is_64, segment.request);
    segment.tile_begin = begin * scale;
    segment.tile_end = min((begin + take) * scale, tiles_of(args, segment.prefix));
    if (take == units) {
      segment.slot = -1;
    } else if (args.granule) {
      segment.slot = static_cast<int>(at_.unit);
    } else {
      segment.slot = 2 * static_cast<int>(blockIdx.x) + (begin == 0);
    }
    if (!wave) {
      at_.unit += take;
      at_.offset += take;
    }
    return true;
  }

  // Partials of the item that `segment` (as just returned by next) begins.
  __device__ __forceinline__ int partials_of_item(const PortableArgs& args, const Segment& segment) const {
    if (args.granule) return at_.request_units;
    if (segment.slot < 0) return 1;
    if (at_.parts > 0) return at_.parts;
    const int64_t last_unit = at_.unit - segment.tile_end + at_.request_units - 1;
    const int64_t longer = static_cast<int64_t>(at_.remainder) * (at_.quotient + 1);  // units of the CTAs with one more
    const int64_t last_cta = last_unit < longer ? last_unit / (at_.quotient + 1)
                                                : at_.remainder + (last_unit - longer) / at_.quotient;
    return static_cast<int>(last_cta) - static_cast<int>(blockIdx.x) + 1;
  }

 private:
  static constexpr int kSegmentCost = 3;  // what the ends of a segment cost, in key tiles
  static constexpr int kCandidates = kSegmentCost;  // the longest part exceeds an even share by less than that

  __device__ __forceinline__ int64_t boundary(int cta) const {
    return static_cast<int64_t>(cta) * at_.quotient + min(cta, at_.remainder);
  }

  // Row tiles of a request that belong to items from `first_item` on.
  static __device__ __forceinline__ int row_tiles_left(const PortableArgs& args, int request, int first_item) {
    return max(0, min(args.row_tiles, (request + 1) * args.row_tiles - first_item));
  }

  static __device__ __forceinline__ int64_t scan(int64_t value) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t below = __shfl_up_sync(0xffffffffu, value, distance);
      if (lane >= distance) value += below;
    }
    return value;
  }

  __device__ __forceinline__ void load_request(const PortableArgs& args, int request) {
    at_.request = request;
    at_.prefix = prefix_length(args.p, request);
    at_.request_units = units_of(args, tiles_of(args, at_.prefix));
  }

  Cursor at_;
};

}  // namespace treeverify
