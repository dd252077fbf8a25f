// Draws a token from one row of logits under temperature, top-k, top-p and min-p, by a group of blocks.
//
// Weights are exp((logit - peak) / temperature) in float32, as integers in units of 2^-40 of the largest: sums of them are
// exact, so neither the order of summation nor the number of blocks matters. Tokens rank by falling logit, equal logits
// by rising id; a filter keeps a run of the first ones, so it is given by its last logit and by how many of the tokens
// with just that logit it keeps (Cut). That logit is found by counting (or weighing) tokens by their distance from the
// peak, and then within the bin that the run ends in by the bits of the logit: a histogram by distance spreads well,
// where leading bits would crowd into few bins. That bin's few logits are listed, for every block in its shared memory; if
// they are too many, the row is read again. The draw itself inverts the cumulative sum in token-id order.
//
// A thread loads kAhead logits before it uses the first: nothing else hides the latency of one block.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "device/block_scan.cuh"
#include "device/order.cuh"
#include "ops/tree_accept/draw_group.cuh"

namespace treeverify {

constexpr int kDrawWarps = kDrawThreads / 32;
constexpr int kSegment = kDrawThreads;        // tokens
constexpr int kAhead = 8;
constexpr float kBinsPerLogit = 64.0f;        // the first histogram reaches 32 below the peak
constexpr float kUnitsOfLargest = 0x1p40f;
constexpr float kGreedyBelow = 1e-5f;
constexpr int64_t kNoToken = -1;

struct DrawShared {
  uint32_t counts[kDrawBins];       // of tokens, by bin; in the draw: at the cut, by segment
  uint32_t mass_low[kDrawBins];     // of weights, by bin
  uint32_t mass_high[kDrawBins];
  uint64_t segments[kDrawThreads];  // weight above the cut, by segment
  uint64_t scan[kDrawWarps];
  uint64_t best[kDrawWarps];
  float list[kListed];  // logits of the bin that a run ends in
  int listed;
  int owner;             // the thread that `pick` found
  int bin, inside;       // what the owner found in its share, and the tokens there
  uint64_t before;       // sum before the owner's share, then before the bin
  uint64_t mass_before;  // weight before the bin
  uint64_t ties_before;  // tokens at the cut before the owner's segment
};

// Keeps the tokens whose ordered bits exceed `bits`, and the first `ties` (by id) of those that equal it.
struct Cut {
  uint32_t bits = 0;
  uint64_t ties = 0;
  uint64_t mass = 0;  // of what is kept
};

__device__ __forceinline__ float logit(const float* row, int token) { return row[token]; }
__device__ __forceinline__ float logit(const __nv_bfloat16* row, int token) { return __bfloat162float(row[token]); }

// Calls use(token, logit) for the calling thread's tokens: `first`, `first` + step, .. below `end`.
template <class T, class Use>
__device__ __forceinline__ void each_token(const T* row, int first, int step, int end, Use use) {
  for (int begin = first; begin < end; begin += kAhead * step) {
    float x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) x[i] = begin + i * step < end ? logit(row, begin + i * step) : 0.0f;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i * step < end) use(begin + i * step, x[i]);
    }
  }
}

// One request's parameters, and the peak of the row.
struct Law {
  float inverse_temperature;
  float top_p, min_p;
  int top_k;
  float peak;

  __device__ __forceinline__ float relative(float x) const { return expf((x - peak) * inverse_temperature); }
  // In units; before and after min-p.
  __device__ __forceinline__ uint64_t weight(float x) const { return __float2ull_rn(relative(x) * kUnitsOfLargest); }
  __device__ __forceinline__ uint64_t kept_weight(float x) const { return relative(x) < min_p ? 0 : weight(x); }
};

// Finds the thread whose share holds unit `target` (1 = the first) of the sum of all `value`s: s.owner, and the sum before
// its share in s.before, both there for all threads. The sum must be at least `target`, and that at least 1.
__device__ __forceinline__ void pick(DrawShared& s, uint64_t value, uint64_t target) {
  const uint64_t before = block_scan<kDrawThreads>(value, s.scan).before;
  if (before < target && before + value >= target) {
    s.owner = static_cast<int>(threadIdx.x);
    s.before = before;
  }
  __syncthreads();
}

__device__ __forceinline__ uint64_t warp_max(uint64_t value) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// The highest logit, the lowest id among equals: ordered bits (high) and complement of the id (low), in all threads.
template <class T>
__device__ __forceinline__ uint64_t best_token(DrawShared& s, Team& team, const T* row) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  float highest = -INFINITY;
  int at = 0;
  bool bad = false;
  each_token(row, team.first + thread, kDrawThreads, team.end, [&](int token, float x) {  // by rising id
    at = x > highest ? token : at;
    highest = fmaxf(highest, x);
    bad |= x != x;
  });
  if (bad) highest = NAN;
  uint64_t best = static_cast<uint64_t>(ordered_bits(highest)) << 32 | ~static_cast<uint32_t>(at);
  best = warp_max(best);
  if (lane == 0) s.best[thread / 32] = best;
  __syncthreads();
  best = warp_max(s.best[lane]);
  if (team.alone()) {
    __syncthreads();
    return best;
  }
  uint64_t* all = team.group->best[team.meetings % 2];
  if (thread == 0) all[team.index] = best;
  team.meet();
  return warp_max(lane < team.blocks ? __ldcg(&all[lane]) : 0);
}

// Finer and finer bins of the logits; a larger logit never has a later bin.
struct Level {
  int distance;   // bin of the first histogram; -1: this is the first
  uint32_t bits;  // leading bits so far, for the later ones
  uint32_t mask;
  int shift;
};

__device__ __forceinline__ int distance_bin(float x, float peak) {
  return static_cast<int>(fminf((peak - x) * kBinsPerLogit, static_cast<float>(kDrawBins - 1)));
}

__device__ __forceinline__ int bin_of(const Level& level, float x, float peak) {
  const int distance = distance_bin(x, peak);
  if (level.distance < 0) return distance;
  const uint32_t bits = ordered_bits(x);
  if (distance != level.distance || (bits & level.mask) != level.bits) return -1;
  return kDrawBins - 1 - static_cast<int>((bits >> level.shift) & (kDrawBins - 1));
}

// Counts and weighs logits by bin; `each(use)` calls use(logit) for those of the calling thread. `by_mass`: what has no
// weight is left out.
template <class Each>
__device__ __forceinline__ void fill_bins(DrawShared& s, const Each& each, const Law& law, const Level& level,
                                          bool by_mass) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int bin = thread; bin < kDrawBins; bin += kDrawThreads) s.counts[bin] = s.mass_low[bin] = s.mass_high[bin] = 0;
  if (thread == 0) s.listed = 0;
  __syncthreads();
  each([&](float x) {
    const int bin = bin_of(level, x, law.peak);
    const uint64_t weight = law.weight(x);
    if (bin < 0 || (by_mass && weight == 0)) return;
    atomicAdd(&s.counts[bin], 1u);
    const uint32_t low = static_cast<uint32_t>(weight);
    const uint32_t old = atomicAdd(&s.mass_low[bin], low);
    const uint32_t high = static_cast<uint32_t>(weight >> 32) + (old + low < old ? 1 : 0);
    if (high != 0) atomicAdd(&s.mass_high[bin], high);
  });
  __syncthreads();
}

__device__ __forceinline__ uint64_t mass_of(const DrawShared& s, int bin) {
  return static_cast<uint64_t>(s.mass_high[bin]) << 32 | s.mass_low[bin];
}

// Makes the block's bins those of the whole group.
__device__ __forceinline__ void merge_bins(DrawShared& s, Team& team) {
  if (team.alone()) return;
  const int thread = static_cast<int>(threadIdx.x), used = static_cast<int>(team.meetings % kHistograms);
  uint32_t* counts = team.group->counts[used];
  auto* masses = reinterpret_cast<unsigned long long*>(team.group->masses[used]);
  for (int bin = thread; bin < kDrawBins; bin += kDrawThreads) {
    if (s.counts[bin] == 0) continue;
    atomicAdd(&counts[bin], s.counts[bin]);
    atomicAdd(&masses[bin], static_cast<unsigned long long>(mass_of(s, bin)));
  }
  team.meet();
  for (int bin = thread; bin < kDrawBins; bin += kDrawThreads) {
    const uint64_t mass = __ldcg(&masses[bin]);
    s.counts[bin] = __ldcg(&counts[bin]);
    s.mass_low[bin] = static_cast<uint32_t>(mass);
    s.mass_high[bin] = static_cast<uint32_t>(mass >> 32);
  }
  __syncthreads();
}

// Lists the logits of the first histogram's bin `distance`, of all blocks, in s.list: `inside` of them. `each` as above,
// for the block's tokens; to be called right after the histogram was merged.
template <class Each>
__device__ __forceinline__ void list_bin(DrawShared& s, Team& team, const Each& each, const Law& law, int distance,
                                         int inside, bool by_mass) {
  const int last = static_cast<int>((team.meetings - 1) % kHistograms);
  int* listed = team.alone() ? &s.listed : reinterpret_cast<int*>(&team.group->listed[last]);
  float* list = team.alone() ? s.list : team.group->list;
  each([&](float x) {
    if (distance_bin(x, law.peak) != distance || (by_mass && law.weight(x) == 0)) return;
    list[atomicAdd(listed, 1)] = x;
  });
  if (team.alone()) return;
  team.meet();
  for (int i = static_cast<int>(threadIdx.x); i < inside; i += kDrawThreads) s.list[i] = __ldcg(&list[i]);
}

// The bin in which the sum (of tokens, or of weights) over the bins reaches `target`: s.bin, the tokens inside it, and the
// sum and the weight before it, there for all threads.
__device__ __forceinline__ void find_bin(DrawShared& s, bool by_mass, uint64_t target) {
  const int thread = static_cast<int>(threadIdx.x), first = 2 * thread;  // this thread's bins: first and first + 1
  const uint64_t masses = mass_of(s, first) + mass_of(s, first + 1);
  const uint64_t mass_before = block_scan<kDrawThreads>(masses, s.scan).before;
  pick(s, by_mass ? masses : uint64_t{s.counts[first]} + s.counts[first + 1], target);
  if (thread == s.owner) {
    const uint64_t half = by_mass ? mass_of(s, first) : s.counts[first];
    const bool second = s.before + half < target;
    s.bin = second ? first + 1 : first;
    s.inside = static_cast<int>(s.counts[s.bin]);
    s.mass_before = mass_before + (second ? mass_of(s, first) : 0);
    if (second) s.before += half;
  }
  __syncthreads();
}

// The weight that top-p wants, in units: top_p of `whole`, which is that of all bins if 0 is given.
__device__ __forceinline__ uint64_t wanted_mass(DrawShared& s, const Law& law, uint64_t whole) {
  const int first = 2 * static_cast<int>(threadIdx.x);
  const uint64_t all = block_scan<kDrawThreads>(mass_of(s, first) + mass_of(s, first + 1), s.scan).total;
  const double wanted = ceil(static_cast<double>(law.top_p) * static_cast<double>(whole != 0 ? whole : all));
  const uint64_t target = wanted < 1.0 ? 1 : static_cast<uint64_t>(wanted);
  return target < all ? target : all;
}

// Where a run of the first tokens ends: after `top_k` of them, or (`by_mass`) once their weight is top_p of `whole` (0: of
// all tokens'). The run exists: top_k < vocab, or top_p <= 1.
template <class T>
__device__ __forceinline__ Cut find_cut(DrawShared& s, Team& team, const T* row, const Law& law, bool by_mass,
                                        uint64_t whole) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto whole_row = [&](auto use) {
    each_token(row, team.first + thread, kDrawThreads, team.end, [&](int, float x) { use(x); });
  };
  Level level{-1, 0, 0, 21};
  fill_bins(s, whole_row, law, level, by_mass);
  merge_bins(s, team);
  uint64_t target = by_mass ? wanted_mass(s, law, whole) : static_cast<uint64_t>(law.top_k);
  find_bin(s, by_mass, target);
  level.distance = s.bin;
  target -= s.before;
  uint64_t mass = s.mass_before;  // of what lies before the bin that the run ends in
  const int inside = s.inside;
  const bool short_list = inside <= kListed;
  if (short_list) list_bin(s, team, whole_row, law, level.distance, inside, by_mass);
  const auto list = [&](auto use) {
    for (int i = thread; i < inside; i += kDrawThreads) use(s.list[i]);
  };
  for (int round = 0; round < 3; ++round) {
    __syncthreads();
    if (short_list) {
      fill_bins(s, list, law, level, by_mass);
    } else {
      fill_bins(s, whole_row, law, level, by_mass);
      merge_bins(s, team);
    }
    find_bin(s, by_mass, target);
    target -= s.before;
    mass += s.mass_before;
    level.bits |= static_cast<uint32_t>(kDrawBins - 1 - s.bin) << level.shift;
    level.mask |= static_cast<uint32_t>(kDrawBins - 1) << level.shift;
    level.shift = level.shift == 21 ? 10 : 0;
  }
  __syncthreads();
  const uint64_t one = law.weight(from_ordered_bits(level.bits));
  const uint64_t ties = by_mass ? (target + one - 1) / one : target;
  return {level.bits, ties, mass + ties * one};
}

// What the filters keep: top-k, then top-p of its weight.
template <class T>
__device__ __forceinline__ Cut filter(DrawShared& s, Team& team, const T* row, int vocab, const Law& law) {
  Cut cut;
  if (law.top_k < vocab) cut = find_cut(s, team, row, law, false, 0);
  if (law.top_p < 1.0f) cut = find_cut(s, team, row, law, true, cut.mass);
  return cut;
}

// Weight and tokens at the cut of each segment of the row, to s.segments and s.counts. A warp takes kAhead * 32 tokens at
// a time.
template <class T>
__device__ __forceinline__ void weigh_segments(DrawShared& s, Team& team, const T* row, int vocab, const Law& law,
                                               const Cut& cut) {
  constexpr int kStretch = 32 * kAhead;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  s.segments[thread] = 0;
  s.counts[thread] = 0;
  __syncthreads();
  for (int begin = team.first + thread / 32 * kStretch; begin < team.end; begin += kDrawWarps * kStretch) {
    uint64_t mass = 0;
    unsigned equal = 0;
    each_token(row, begin + lane, 32, min(begin + kStretch, team.end), [&](int, float x) {
      const uint32_t bits = ordered_bits(x);
      if (bits > cut.bits) mass += law.kept_weight(x);
      equal += bits == cut.bits;
    });
    for (int distance = 1; distance < 32; distance *= 2) mass += __shfl_xor_sync(0xffffffffu, mass, distance);
    equal = __reduce_add_sync(0xffffffffu, equal);
    if (lane == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&s.segments[begin / kSegment]), static_cast<unsigned long long>(mass));
      atomicAdd(&s.counts[begin / kSegment], equal);
    }
  }
  __syncthreads();
  if (team.alone()) return;
  const int token = thread * kSegment;
  if (token >= team.first && token < team.end) {
    team.group->segments[thread] = s.segments[thread];
    team.group->ties[thread] = s.counts[thread];
  }
  team.meet();
  if (token < vocab) {
    s.segments[thread] = __ldcg(&team.group->segments[thread]);
    s.counts[thread] = __ldcg(&team.group->ties[thread]);
  }
}

// The first token, by id, at which the cumulative weight of what is kept exceeds `uniform` times the whole.
template <class T>
__device__ __forceinline__ int draw(DrawShared& s, Team& team, const T* row, int vocab, const Law& law, const Cut& cut,
                                    double uniform) {
  const int thread = static_cast<int>(threadIdx.x);
  weigh_segments(s, team, row, vocab, law, cut);
  const uint64_t at_cut = cut.bits == 0 ? 0 : law.kept_weight(from_ordered_bits(cut.bits));
  const bool there = thread * kSegment < vocab;
  const uint64_t equal = there ? s.counts[thread] : 0;
  const uint64_t equal_before = block_scan<kDrawThreads>(equal, s.scan).before;
  const uint64_t room = cut.ties > equal_before ? cut.ties - equal_before : 0;
  const uint64_t mass = there ? s.segments[thread] + (equal < room ? equal : room) * at_cut : 0;
  const uint64_t whole = block_scan<kDrawThreads>(mass, s.scan).total;
  // floor(uniform * whole), exactly: uniform is a multiple of 2^-53
  const uint64_t target = __umul64hi(__double2ull_rz(uniform * 0x1p53) << 11, whole) + 1;
  pick(s, mass, target);
  if (thread == s.owner) s.ties_before = equal_before;
  __syncthreads();
  const int begin = s.owner * kSegment;
  const uint64_t rest = target - s.before, ties_before = s.ties_before;
  __syncthreads();
  const float x = begin + thread < vocab ? logit(row, begin + thread) : -INFINITY;
  const uint32_t bits = begin + thread < vocab ? ordered_bits(x) : 0;
  const bool tied = bits != 0 && bits == cut.bits;
  const uint64_t place = ties_before + block_scan<kDrawThreads>(tied ? 1 : 0, s.scan).before;
  pick(s, bits > cut.bits ? law.kept_weight(x) : tied && place < cut.ties ? at_cut : 0, rest);
  const int token = begin + s.owner;
  __syncthreads();
  return token;
}

}  // namespace treeverify
