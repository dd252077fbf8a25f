// What a tree-attention launch needs: pointers, strides and sizes, no tensors. Shapes: [batch, nodes, heads, dim].
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace treeverify {

constexpr int kLatent = 512;  // columns of a KV row that are also its value vector
constexpr int kRope = 64;
constexpr int kRow = kLatent + kRope;
constexpr int kMaxNodes = 260;
constexpr int kMaxHeads = 128;
constexpr int kMaxRows = 1 << 22;  // batch * nodes * heads: so many row tiles' key tiles, at 262,144 keys, count in 31 bits

// How the draft columns of a node are masked.
enum class MaskKind : int32_t {
  kCausal = 0,  // node i sees nodes 0 .. i
  kFlat = 1,    // bytes, per request nodes x (P + nodes) row-major at mask_indptr; only the last nodes columns are read
  kBits = 2,    // 64-bit words [batch, nodes, words], bit j of word w = column 64 * w + j
};

struct TreeAttentionParams {
  const void* q;            // bf16 [batch * nodes, heads, kRow]
  int64_t q_token_stride;   // elements
  int64_t q_head_stride;    // elements
  const void* draft_kv;     // bf16 [batch * nodes, kRow]
  int64_t draft_stride;     // elements between rows
  const void* kv_pool;      // bf16 [slots, kRow]
  int64_t pool_stride;      // elements between rows
  const void* kv_indptr;    // int32 or int64 [batch + 1], prefix only
  const void* kv_indices;   // int32 or int64 [>= kv_indptr[batch]], prefix slots only
  const void* mask;         // see MaskKind; nullptr if causal
  const void* mask_indptr;  // int32 or int64 [batch + 1], kFlat only
  void* out;                // bf16 [batch * nodes, heads, kLatent]
  int64_t out_token_stride;
  int64_t out_head_stride;
  float* lse;               // fp32 [batch * nodes, heads], contiguous, natural log
  void* workspace;          // fp32 partials; size by workspace_bytes()
  int64_t workspace_bytes;
  int32_t batch;
  int32_t nodes;
  int32_t heads;
  int32_t mask_words;         // kBits only
  MaskKind mask_kind;
  bool indptr_is_64;
  bool indices_is_64;
  bool mask_indptr_is_64;
  float scale;                // multiplies q . k; base e
  int32_t fixed_split;        // KV rows per split (a multiple of the tile), 0 = balanced over the device
  int64_t max_prefix;         // bound on any prefix length as the host knows it; a tight one lets short calls spread wider
  int32_t multiprocessors;    // of the device, so that the launch asks nothing at run time
};

}  // namespace treeverify
