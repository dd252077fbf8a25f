// Tree attention, the plain way: the baseline of the benchmarks and a second, independent GPU implementation.
//
// One block computes one (token, head): out = softmax(q . K^T * scale) . V over the request's prefix and the draft nodes
// that the token sees. All scores of the block lie in shared memory as fp32, which bounds the prefix. Three phases, a
// barrier after each: (1) one warp per KV row forms scores; (2) the block reduces maximum and sum, scores become
// weights; (3) each thread owns two columns of the output and walks all rows. Every KV row is read twice, by each block.
//
// Inputs are bf16, everything else is fp32. A draft row that the token does not see is never read.
// Assumes kNaiveThreads threads and (max_prefix + nodes) * 4 bytes of dynamic shared memory. A request that is longer
// than `max_prefix` gets NaN: loud, and nothing is written out of bounds.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "ops/tree_attention/params.h"

namespace treeverify {

constexpr int kNaiveThreads = kLatent / 2;  // phase 3: two columns per thread
constexpr int kNaiveWarps = kNaiveThreads / 32;
constexpr int kNaivePairs = kRow / 2 / 32;  // bf16 pairs of a row per lane
static_assert(kRow % 64 == 0, "a warp reads a row as 32 lanes of whole pairs");

struct NaiveShared {
  float2 query[kRow / 2];
  float reduced[kNaiveWarps];
};

__device__ inline int64_t load_index(const void* base, bool is_64, int64_t i) {
  return is_64 ? static_cast<const int64_t*>(base)[i] : static_cast<const int32_t*>(base)[i];
}

// May `node` of `request` see draft node `column`? `prefix` is the request's prefix length.
__device__ inline bool naive_sees(const TreeAttentionParams& p, int64_t request, int node, int column, int64_t prefix) {
  if (p.mask_kind == MaskKind::kFlat) {
    const int64_t begin = load_index(p.mask_indptr, p.mask_indptr_is_64, request);
    return static_cast<const uint8_t*>(p.mask)[begin + node * (prefix + p.nodes) + prefix + column] != 0;
  }
  if (p.mask_kind == MaskKind::kBits) {
    const int64_t row = (request * p.nodes + node) * p.mask_words;
    return static_cast<const uint64_t*>(p.mask)[row + column / 64] >> (column % 64) & 1;
  }
  return column <= node;
}

template <bool kMaximum>
__device__ inline float naive_reduce(float value, float* reduced) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, value, offset);
    value = kMaximum ? fmaxf(value, other) : value + other;
  }
  __syncthreads();  // the results of an earlier reduction have been read
  if (threadIdx.x % 32 == 0) reduced[threadIdx.x / 32] = value;
  __syncthreads();
  value = reduced[0];
#pragma unroll
  for (int warp = 1; warp < kNaiveWarps; ++warp) {
    value = kMaximum ? fmaxf(value, reduced[warp]) : value + reduced[warp];
  }
  return value;
}

__device__ inline float2 naive_pair(const __nv_bfloat16* row, int pair) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(row)[pair]);
}

// One warp: the dot product of the query with a KV row, in every lane.
__device__ inline float naive_dot(const float2* query, const __nv_bfloat16* row) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kNaivePairs; ++i) {
    const int pair = i * 32 + static_cast<int>(threadIdx.x % 32);
    const float2 k = naive_pair(row, pair);
    sum = fmaf(query[pair].x, k.x, fmaf(query[pair].y, k.y, sum));
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return sum;
}

__global__ void __launch_bounds__(kNaiveThreads)
    smxx_bf16_tree_attention_naive(const __grid_constant__ TreeAttentionParams p, int64_t max_prefix) {
  extern __shared__ float scores[];  // [prefix + nodes]
  __shared__ NaiveShared shared;
  const int64_t token = blockIdx.x / p.heads;
  const int head = static_cast<int>(blockIdx.x % p.heads);
  const int64_t request = token / p.nodes;
  const int node = static_cast<int>(token % p.nodes);
  const int64_t begin = load_index(p.kv_indptr, p.indptr_is_64, request);
  const int64_t prefix = load_index(p.kv_indptr, p.indptr_is_64, request + 1) - begin;
  auto* out = reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.out) + token * p.out_token_stride +
                                                head * p.out_head_stride);
  if (prefix > max_prefix || prefix < 0) {
    out[threadIdx.x] = __float2bfloat162_rn(NAN);
    if (threadIdx.x == 0) p.lse[token * p.heads + head] = NAN;
    return;
  }
  const auto* pool = static_cast<const __nv_bfloat16*>(p.kv_pool);
  const auto* draft = static_cast<const __nv_bfloat16*>(p.draft_kv) + request * p.nodes * p.draft_stride;
  const auto* query =
      static_cast<const __nv_bfloat16*>(p.q) + token * p.q_token_stride + head * p.q_head_stride;
  for (int pair = threadIdx.x; pair < kRow / 2; pair += kNaiveThreads) shared.query[pair] = naive_pair(query, pair);
  __syncthreads();

  const int64_t rows = prefix + p.nodes;
  const bool first_lane = threadIdx.x % 32 == 0;
  for (int64_t row = threadIdx.x / 32; row < rows; row += kNaiveWarps) {
    float score = -INFINITY;
    if (row < prefix) {
      const int64_t slot = load_index(p.kv_indices, p.indices_is_64, begin + row);
      score = naive_dot(shared.query, pool + slot * p.pool_stride) * p.scale;
    } else {
      const int column = static_cast<int>(row - prefix);
      if (naive_sees(p, request, node, column, prefix)) {
        score = naive_dot(shared.query, draft + column * p.draft_stride) * p.scale;
      }
    }
    if (first_lane) scores[row] = score;
  }
  __syncthreads();

  float peak = -INFINITY;
  for (int64_t row = threadIdx.x; row < rows; row += kNaiveThreads) peak = fmaxf(peak, scores[row]);
  peak = naive_reduce<true>(peak, shared.reduced);
  const float base = peak == -INFINITY ? 0.0f : peak;  // nothing seen: exp(-inf - 0) = 0, not exp(-inf + inf) = NaN
  float total = 0.0f;
  for (int64_t row = threadIdx.x; row < rows; row += kNaiveThreads) {
    const float weight = expf(scores[row] - base);
    scores[row] = weight;
    total += weight;
  }
  total = naive_reduce<false>(total, shared.reduced);  // its barriers also publish the weights

  float2 sum = {0.0f, 0.0f};
#pragma unroll 4
  for (int64_t row = 0; row < prefix; ++row) {
    const int64_t slot = load_index(p.kv_indices, p.indices_is_64, begin + row);
    const float2 v = naive_pair(pool + slot * p.pool_stride, threadIdx.x);
    sum.x = fmaf(scores[row], v.x, sum.x);
    sum.y = fmaf(scores[row], v.y, sum.y);
  }
  for (int column = 0; column < p.nodes; ++column) {
    if (!naive_sees(p, request, node, column, prefix)) continue;  // a zero weight would not do: 0 * NaN is NaN
    const float2 v = naive_pair(draft + column * p.draft_stride, threadIdx.x);
    sum.x = fmaf(scores[prefix + column], v.x, sum.x);
    sum.y = fmaf(scores[prefix + column], v.y, sum.y);
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  out[threadIdx.x] = __floats2bfloat162_rn(sum.x * inverse, sum.y * inverse);
  if (threadIdx.x == 0) p.lse[token * p.heads + head] = base + logf(total);
}

}  // namespace treeverify
