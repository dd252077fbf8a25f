// draft_topk and its halves: tensors to parameters. Nothing is launched, and no device touched, before every check has
// passed.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "host/arguments.h"
#include "ops/draft_topk/launch.h"
#include "ops/draft_topk/params.h"

namespace treeverify {

namespace {

using host::Dim;
using tvm::ffi::TensorView;

// The sizes of a call, bound by its tensors.
struct Sizes {
  Dim batch{"batch"}, depth{"depth"}, vocab{"vocab"}, k{"k"};
};

// The first kernel's parameters; its results go to `workspace`. `z.k` must be bound.
TopkTileParams tile_params(host::Arguments& call, const char* op, Sizes& z, TensorView logits, TensorView workspace,
                           int64_t first_id) {
  TopkTileParams p{};
  p.logits = call.rows("logits", logits, {&z.batch, &z.depth, &z.vocab}, {host::kFloat32, host::kBf16});
  p.is_bf16 = host::same_dtype(logits.dtype(), host::kBf16);
  call.range("k", z.k.value(), 1, kMaxRanks);
  call.range("logits: dimension 2 (vocab)", z.vocab.value(), 1, kMaxTopkVocab);
  call.range("first_id", first_id, 0, kMaxTopkVocab - z.vocab.value());
  call.range("logits: batch * depth", z.batch.value() * z.depth.value(), 0, INT32_MAX / (kMaxRanks + 1));
  const int64_t tiles = (z.vocab.value() + kTileColumns - 1) / kTileColumns;
  Dim elements("elements");
  p.packed = static_cast<int64_t*>(call.dense("workspace", workspace, {&elements}, {host::kInt64}));
  const int64_t least = tiles * z.batch.value() * z.depth.value() * (z.k.value() + 1);
  if (elements.value() < least) {
    host::refuse(op, "workspace: dimension 0 (elements)", ">= " + std::to_string(least), elements.value());
  }
  p.request_stride = logits.stride(0);
  p.depth_stride = logits.stride(1);
  p.batch = static_cast<int32_t>(z.batch.value());
  p.depth = static_cast<int32_t>(z.depth.value());
  p.vocab = static_cast<int32_t>(z.vocab.value());
  p.k = static_cast<int32_t>(z.k.value());
  p.tiles = static_cast<int32_t>(tiles);
  p.first_id = static_cast<int32_t>(first_id);
  return p;
}

// The second kernel's parameters, to merge what the first one wrote.
TopkMergeParams merge_params(const TopkTileParams& tiles) {
  TopkMergeParams p{};
  p.parts = tiles.packed;
  p.count = tiles.tiles;
  p.rows = tiles.batch * tiles.depth;
  p.k = tiles.k;
  return p;
}

void launch(const host::Arguments& call, const TopkTileParams& tiles, const TopkMergeParams& merge) {
  call.run([&](cudaStream_t stream) {
    const cudaError_t status = launch_topk_tiles(tiles, stream);
    return status == cudaSuccess ? launch_topk_merge(merge, stream) : status;
  });
}

void draft_topk(TensorView logits, TensorView workspace, TensorView log_probs, TensorView token_ids) {
  host::Arguments call("draft_topk");
  Sizes z;
  float* values = static_cast<float*>(call.dense("log_probs", log_probs, {&z.batch, &z.depth, &z.k}, {host::kFloat32}));
  const TopkTileParams tiles = tile_params(call, "draft_topk", z, logits, workspace, 0);
  TopkMergeParams merge = merge_params(tiles);
  merge.log_probs = values;
  merge.token_ids = static_cast<int64_t*>(
      call.dense("token_ids", token_ids, {&z.batch, &z.depth, &z.k}, {host::kInt64}));
  launch(call, tiles, merge);
}

void draft_topk_shard(TensorView logits, int64_t first_id, TensorView workspace, TensorView out) {
  host::Arguments call("draft_topk_shard");
  Sizes z;
  Dim entries("k + 1");
  auto* packed = static_cast<int64_t*>(call.dense("out", out, {&z.batch, &z.depth, &entries}, {host::kInt64}));
  z.k.bind(entries.value() - 1);
  const TopkTileParams tiles = tile_params(call, "draft_topk_shard", z, logits, workspace, first_id);
  TopkMergeParams merge = merge_params(tiles);
  merge.packed = packed;
  launch(call, tiles, merge);
}

void draft_topk_combine(TensorView shards, TensorView log_probs, TensorView token_ids) {
  host::Arguments call("draft_topk_combine");
  Sizes z;
  Dim count("shards"), entries("k + 1");
  TopkMergeParams p{};
  p.parts = static_cast<const int64_t*>(
      call.dense("shards", shards, {&count, &z.batch, &z.depth, &entries}, {host::kInt64}));
  z.k.bind(entries.value() - 1);
  p.log_probs = static_cast<float*>(call.dense("log_probs", log_probs, {&z.batch, &z.depth, &z.k}, {host::kFloat32}));
  p.token_ids = static_cast<int64_t*>(
      call.dense("token_ids", token_ids, {&z.batch, &z.depth, &z.k}, {host::kInt64}));
  call.range("shards: dimension 0 (shards)", count.value(), 1, 1024);
  call.range("shards: dimension 3 (k + 1)", entries.value(), 2, kMaxRanks + 1);
  call.range("shards: batch * depth", z.batch.value() * z.depth.value(), 0, INT32_MAX / (kMaxRanks + 1));
  p.count = static_cast<int32_t>(count.value());
  p.rows = static_cast<int32_t>(z.batch.value() * z.depth.value());
  p.k = static_cast<int32_t>(z.k.value());
  call.run([&](cudaStream_t stream) { return launch_topk_merge(p, stream); });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(draft_topk, draft_topk);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(draft_topk_shard, draft_topk_shard);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(draft_topk_combine, draft_topk_combine);

}  // namespace treeverify
