// Draws a token from one row of logits under temperature, top-k, top-p and min-p, by one block.
//
// Weights are exp((logit - peak) / temperature) in float32, as integers in units of 2^-40 of the largest: sums of them are
// exact, so neither the order of summation nor the number of threads matters. Tokens rank by falling logit, equal logits
// by rising id; a filter keeps a run of the first ones, so it is given by its last logit and by how many of the tokens
// with just that logit it keeps (Cut). That logit is found by counting (or weighing) tokens by their distance from the
// peak, and then within the bin that the run ends in by the bits of the logit: a histogram by distance spreads well,
// where leading bits would crowd into few bins. The draw itself inverts the cumulative sum in token-id order.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "device/block_scan.cuh"
#include "device/order.cuh"

namespace treeverify {

constexpr int kDrawThreads = 1024;
constexpr int kDrawWarps = kDrawThreads / 32;
constexpr int kDrawBins = 2048;
constexpr int kSegment = kDrawThreads;        // tokens
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
  int owner;             // the thread that `pick` found
  int bin;               // what the owner found in its share
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

// The highest logit, the lowest id among equals: ordered bits (high) and complement of the id (low), in all threads.
template <class T>
__device__ __forceinline__ uint64_t best_token(DrawShared& s, const T* row, int vocab) {
  uint64_t best = 0;
#pragma unroll 8
  for (int token = static_cast<int>(threadIdx.x); token < vocab; token += kDrawThreads) {
    const uint64_t key = static_cast<uint64_t>(ordered_bits(logit(row, token))) << 32 | ~static_cast<uint32_t>(token);
    best = key > best ? key : best;
  }
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, best, distance);
    best = other > best ? other : best;
  }
  if (threadIdx.x % 32 == 0) s.best[threadIdx.x / 32] = best;
  __syncthreads();
  for (int warp = 0; warp < kDrawWarps; ++warp) best = s.best[warp] > best ? s.best[warp] : best;
  __syncthreads();
  return best;
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

// Counts and weighs the tokens by bin. `by_mass`: tokens without weight are left out.
template <class T>
__device__ __forceinline__ void fill_bins(DrawShared& s, const T* row, int vocab, const Law& law, const Level& level,
                                          bool by_mass) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int bin = thread; bin < kDrawBins; bin += kDrawThreads) s.counts[bin] = s.mass_low[bin] = s.mass_high[bin] = 0;
  __syncthreads();
#pragma unroll 4
  for (int token = thread; token < vocab; token += kDrawThreads) {
    const float x = logit(row, token);
    const int bin = bin_of(level, x, law.peak);
    if (bin < 0) continue;
    const uint64_t weight = law.weight(x);
    if (by_mass && weight == 0) continue;
    atomicAdd(&s.counts[bin], 1u);
    const uint32_t low = static_cast<uint32_t>(weight);
    const uint32_t old = atomicAdd(&s.mass_low[bin], low);
    const uint32_t high = static_cast<uint32_t>(weight >> 32) + (old + low < old ? 1 : 0);
    if (high != 0) atomicAdd(&s.mass_high[bin], high);
  }
  __syncthreads();
}

__device__ __forceinline__ uint64_t mass_of(const DrawShared& s, int bin) {
  return static_cast<uint64_t>(s.mass_high[bin]) << 32 | s.mass_low[bin];
}

// Where a run of the first tokens ends: after `top_k` of them, or (`by_mass`) once their weight is top_p of `whole`, which
// is all tokens' weight if 0 is given. The run exists: top_k < vocab, or top_p <= 1.
template <class T>
__device__ __forceinline__ Cut find_cut(DrawShared& s, const T* row, int vocab, const Law& law, bool by_mass,
                                        uint64_t whole) {
  const int first = 2 * static_cast<int>(threadIdx.x);  // this thread's bins: first and first + 1
  Level level{-1, 0, 0, 0};
  uint64_t target = by_mass ? 0 : static_cast<uint64_t>(law.top_k);
  uint64_t mass = 0;  // of all bins before the one that the run ends in
  for (int round = 0; round < 4; ++round) {
    fill_bins(s, row, vocab, law, level, by_mass);
    const uint64_t masses = mass_of(s, first) + mass_of(s, first + 1);
    const Scanned weighed = block_scan<kDrawThreads>(masses, s.scan);
    if (by_mass && round == 0) {
      const double wanted = static_cast<double>(law.top_p) * static_cast<double>(whole != 0 ? whole : weighed.total);
      target = static_cast<uint64_t>(ceil(wanted));
      target = target > 0 ? target : 1;
      target = target < weighed.total ? target : weighed.total;
    }
    pick(s, by_mass ? masses : uint64_t{s.counts[first]} + s.counts[first + 1], target);
    if (static_cast<int>(threadIdx.x) == s.owner) {
      const uint64_t half = by_mass ? mass_of(s, first) : s.counts[first];
      const bool second = s.before + half < target;
      s.bin = second ? first + 1 : first;
      s.mass_before = weighed.before + (second ? mass_of(s, first) : 0);
      if (second) s.before += half;
    }
    __syncthreads();
    const int bin = s.bin;
    target -= s.before;
    mass += s.mass_before;
    if (round == 0) {
      level = {bin, 0, 0, 21};
    } else {
      const int digit = kDrawBins - 1 - bin;
      level.bits |= static_cast<uint32_t>(digit) << level.shift;
      level.mask |= static_cast<uint32_t>(kDrawBins - 1) << level.shift;
      level.shift = level.shift == 21 ? 10 : 0;
    }
  }
  Cut cut;
  cut.bits = level.bits;
  const uint64_t one = law.weight(from_ordered_bits(cut.bits));
  cut.ties = by_mass ? (target + one - 1) / one : target;
  cut.mass = mass + cut.ties * one;
  return cut;
}

// What the filters keep: top-k, then top-p of its weight.
template <class T>
__device__ __forceinline__ Cut filter(DrawShared& s, const T* row, int vocab, const Law& law) {
  Cut cut;
  if (law.top_k < vocab) cut = find_cut(s, row, vocab, law, false, 0);
  if (law.top_p < 1.0f) cut = find_cut(s, row, vocab, law, true, cut.mass);
  return cut;
}

// Weight and tokens at the cut of each segment, to s.segments and s.counts: one warp per segment.
template <class T>
__device__ __forceinline__ void weigh_segments(DrawShared& s, const T* row, int vocab, const Law& law, const Cut& cut) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int segment = static_cast<int>(threadIdx.x) / 32; segment * kSegment < vocab; segment += kDrawWarps) {
    uint64_t mass = 0;
    unsigned equal = 0;
#pragma unroll 8
    for (int i = lane; i < kSegment; i += 32) {
      const int token = segment * kSegment + i;
      if (token >= vocab) break;
      const float x = logit(row, token);
      const uint32_t bits = ordered_bits(x);
      if (bits > cut.bits) mass += law.kept_weight(x);
      equal += bits == cut.bits;
    }
    for (int distance = 1; distance < 32; distance *= 2) mass += __shfl_xor_sync(0xffffffffu, mass, distance);
    equal = __reduce_add_sync(0xffffffffu, equal);
    if (lane == 0) {
      s.segments[segment] = mass;
      s.counts[segment] = equal;
    }
  }
  __syncthreads();
}

// The first token, by id, at which the cumulative weight of what is kept exceeds `uniform` times the whole.
template <class T>
__device__ __forceinline__ int draw(DrawShared& s, const T* row, int vocab, const Law& law, const Cut& cut,
                                    double uniform) {
  const int thread = static_cast<int>(threadIdx.x);
  weigh_segments(s, row, vocab, law, cut);
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
