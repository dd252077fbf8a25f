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
//   cut:   otherwise every CTA takes a contiguous range of the units left, of nearly equal size. If there are many, each
//          item counts for some more, before its first: what it costs the CTA that goes on to it from another.
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
  int unit;           // next unit of this CTA
  int end;            // exclusive
  int offset;         // of `unit` within its request, over all its row tiles that are in no wave
  int quotient;       // of the units by the CTAs that share them evenly
  int remainder;
  int parts;          // CTAs that share this CTA's item; 0 if the units are cut evenly
  int cost;           // units that each item counts for in addition, before its first
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

class Schedule {
 public:
  __device__ __forceinline__ explicit Schedule(const Cursor& at) : at_(at) {}
  __device__ __forceinline__ const Cursor& cursor() const { return at_; }

  __device__ __forceinline__ explicit Schedule(const PortableArgs& args) {
    const int per_lane = (args.p.batch + 31) / 32;
    const int first = min((static_cast<int>(threadIdx.x) & 31) * per_lane, args.p.batch);
    const int last = min(first + per_lane, args.p.batch);
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    const int items = args.p.batch * args.row_tiles;
    const int own_units = first < last ? units_of(args, tiles_of(args, prefix_length(args.p, first))) : 0;
    // The sum over this lane's requests of f(request, its units per row tile).
    const auto sum = [&](auto f) {
      int total = first < last ? f(first, own_units) : 0;
#pragma unroll 1
      for (int request = first + 1; request < last; ++request) {
        total += f(request, units_of(args, tiles_of(args, prefix_length(args.p, request))));
      }
      return total;
    };
    at_.waves = args.granule == 0 && items > ctas ? count_waves(args, items, sum) : 0;
    at_.wave = at_.parts = at_.cost = 0;
    const int first_item = at_.waves * ctas;
    const auto cut_evenly = [&](int request, int units) {
      return (units + at_.cost) * row_tiles_left(args, request, first_item);
    };
    int own = sum(cut_evenly);
    int through = warp_scan(own);
    int units = __shfl_sync(0xffffffffu, through, 31);  // of all CTAs
    at_.quotient = units / ctas;
    at_.remainder = units - at_.quotient * ctas;
    int share = 0;  // of an item per CTA, if the items are cut into parts
    if (args.granule == 0 && args.allow_parts && items - first_item <= ctas && units > 0) {
      const int even = at_.quotient + (at_.remainder > 0);
#pragma unroll 1
      for (int longest = even; longest < even + kSegmentCost; ++longest) {
        const int parts = sum([&](int request, int units) {
          return (units + longest - 1) / longest * row_tiles_left(args, request, first_item);
        });
        const int all_through = warp_scan(parts);
        if (__shfl_sync(0xffffffffu, all_through, 31) > ctas) continue;
        share = longest;
        own = parts;
        through = all_through;
        break;
      }
    }
    if (args.granule == 0 && share == 0 && at_.quotient >= 2 * kCutCost) {
      at_.cost = kCutCost;
      own = sum(cut_evenly);
      through = warp_scan(own);
      units = __shfl_sync(0xffffffffu, through, 31);
      at_.quotient = units / ctas;
      at_.remainder = units - at_.quotient * ctas;
    }
    // The request that holds this CTA's first unit, or its part.
    at_.unit = share > 0 ? cta : boundary(cta);
    const uint32_t beyond = __ballot_sync(0xffffffffu, through > at_.unit);
    if (beyond == 0) {
      at_.end = at_.unit;
      return;
    }
    const int owner = __ffs(static_cast<int>(beyond)) - 1;
    int offset = at_.unit - (through - own);
    int request = first;
#pragma unroll 1
    for (; request + 1 < last; ++request) {  // of use in the owner's lane
      const int units = units_of(args, tiles_of(args, prefix_length(args.p, request)));
      const int weight = (share > 0 ? (units + share - 1) / share : units + at_.cost) * row_tiles_left(args, request, first_item);
      if (offset < weight) break;
      offset -= weight;
    }
    __syncwarp();
    at_.offset = __shfl_sync(0xffffffffu, offset, owner);
    load_request(args, __shfl_sync(0xffffffffu, request, owner));
    if (share > 0) {
      take_part(share);
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
      int weight = at_.request_units + at_.cost;
      if (at_.offset == weight * row_tiles_left(args, at_.request, first_item)) {
        at_.offset = 0;
        load_request(args, at_.request + 1);
        weight = at_.request_units + at_.cost;
      }
      const int row_tile = at_.offset / weight;
      const int first = at_.offset - row_tile * weight;
      const int advance = args.granule ? 1 : min(at_.end - at_.unit, weight - first);
      units = at_.request_units;
      begin = max(0, first - at_.cost);
      take = max(0, first + advance - at_.cost) - begin;
      if (take == 0) return false;  // the range ends before the item's first unit
      at_.unit += advance;
      at_.offset += advance;
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
      segment.slot = at_.unit - 1;
    } else {
      segment.slot = 2 * static_cast<int>(blockIdx.x) + (begin == 0);
    }
    return true;
  }

  // Partials of the item that `segment` (as just returned by next) begins.
  __device__ __forceinline__ int partials_of_item(const PortableArgs& args, const Segment& segment) const {
    if (args.granule) return at_.request_units;
    if (segment.slot < 0) return 1;
    if (at_.parts > 0) return at_.parts;
    const int last_unit = at_.unit - segment.tile_end + at_.request_units - 1;
    const int longer = at_.remainder * (at_.quotient + 1);  // units of the CTAs with one more
    const int last_cta =
        last_unit < longer ? last_unit / (at_.quotient + 1) : at_.remainder + (last_unit - longer) / at_.quotient;
    return last_cta - static_cast<int>(blockIdx.x) + 1;
  }

 private:
  static constexpr int kSegmentCost = 3;  // how many key tiles the longest part may have more than an even share
  static constexpr int kCutCost = 7;      // what an item costs the CTA that goes on to it, when the units are cut

  // Whole waves of whole items, if they make the call no longer than even shares would.
  template <class Sum>
  static __device__ __forceinline__ int count_waves(const PortableArgs& args, int items, const Sum& sum) {
    const int ctas = static_cast<int>(gridDim.x);
    int own_longest = 0;
    const int own = sum([&](int, int units) {
      own_longest = max(own_longest, units);
      return units;
    });
    const int longest = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned>(own_longest)));
    const int even = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(own))) * args.row_tiles / ctas;
    const int waves = items / ctas;
    const int rest = (items - waves * ctas) * longest / ctas;
    return waves * longest + rest <= even + even / 32 + kSegmentCost ? waves : 0;
  }

  // Parts of an item, in units, differ by one at most; `offset` counts parts so far.
  __device__ __forceinline__ void take_part(int share) {
    const int units = at_.request_units;
    at_.parts = (units + share - 1) / share;
    const int row_tile = at_.offset / at_.parts;
    const int part = at_.offset - row_tile * at_.parts;
    const int least = units / at_.parts;
    const int longer = units - least * at_.parts;
    at_.offset = row_tile * units + part * least + min(part, longer);
    at_.unit = 0;
    at_.end = least + (part < longer);
  }

  __device__ __forceinline__ int boundary(int cta) const { return cta * at_.quotient + min(cta, at_.remainder); }

  // Row tiles of a request that belong to items from `first_item` on.
  static __device__ __forceinline__ int row_tiles_left(const PortableArgs& args, int request, int first_item) {
    return max(0, min(args.row_tiles, (request + 1) * args.row_tiles - first_item));
  }

  __device__ __forceinline__ void load_request(const PortableArgs& args, int request) {
    at_.request = request;
    at_.prefix = prefix_length(args.p, request);
    at_.request_units = units_of(args, tiles_of(args, at_.prefix));
  }

  Cursor at_;
};

}  // namespace treeverify
