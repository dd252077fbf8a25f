// tree_attention: tensors to TreeAttentionParams. Compiled once per specialisation; the defines of jit/modules.py say
// which launch it calls. Nothing is launched, and no device touched, before every check has passed.
#include <cmath>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "host/check.h"
#include "host/tensor_contract.h"
#include "ops/tree_attention/launch.h"
#include "ops/tree_attention/params.h"

namespace treeverify {

namespace {

using host::Dim;
using host::refuse;
using host::TensorContract;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

constexpr const char* kOp = "tree_attention";
constexpr int64_t kAlignment = 16;  // bytes; every row is read and written 128 bits at a time

void check_range(const char* what, int64_t got, int64_t low, int64_t high) {
  if (got < low || got > high) refuse(kOp, what, std::to_string(low) + ".." + std::to_string(high), got);
}

void check_query(const TensorContract& q, Dim& tokens, Dim& heads, int64_t nodes, double scale) {
  check_range("nodes", nodes, 1, kMaxNodes);
  if (!(std::isfinite(scale) && scale > 0.0)) refuse(kOp, "scale", "a finite float > 0", scale);
  Dim row("row", kRow);
  q.rank(3, 3).dim(0, tokens).dim(1, heads).dim(2, row).dtype({host::kBf16}).rows(kRow, kAlignment);
  if (tokens.value() % nodes != 0) {
    refuse(kOp, "q: dimension 0 (batch*nodes)", "a multiple of nodes = " + std::to_string(nodes), tokens.value());
  }
  check_range("q: dimension 1 (heads)", heads.value(), 1, kMaxHeads);
}

void check_rows(const TensorContract& kv, const TensorView& view, Dim& rows) {
  Dim one("KV heads", 1);
  Dim row("row", kRow);
  kv.rank(2, 3);
  if (view.ndim() == 3) kv.dim(1, one);
  kv.dim(0, rows).dim(-1, row).dtype({host::kBf16}).rows(kRow, kAlignment);
}

void check_mask(TreeAttentionParams& p, const TensorContract& mask, const TensorContract& indptr, Dim& pointers) {
  Dim cells("batch * nodes * nodes", int64_t{p.batch} * p.nodes * p.nodes);
  mask.rank(1, 1).at_least(0, cells).dtype({host::kBool, host::kUint8}).contiguous();
  indptr.rank(1, 1).dim(0, pointers).dtype({host::kInt32, host::kInt64}).contiguous();
  p.mask_kind = MaskKind::kFlat;
  p.mask = mask.data();
  p.mask_indptr = indptr.data();
  p.mask_indptr_is_64 = indptr.is(host::kInt64);
}

void check_bits(TreeAttentionParams& p, const TensorContract& bits) {
  Dim batch("batch", p.batch);
  Dim nodes("nodes", p.nodes);
  Dim words("words", (p.nodes + 63) / 64);
  bits.rank(3, 3).dim(0, batch).dim(1, nodes).dim(2, words).dtype({host::kInt64, host::kUint64}).contiguous();
  p.mask_kind = MaskKind::kBits;
  p.mask = bits.data();
  p.mask_words = static_cast<int32_t>(words.value());
}

#ifdef TREEVERIFY_NAIVE
int64_t workspace_bytes(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) { return 0; }
int64_t prefix_limit(int64_t nodes) { return naive_max_prefix(static_cast<int32_t>(nodes)); }
int64_t shared_bytes() { return naive_shared_bytes(); }
cudaError_t launch(const TreeAttentionParams& p, int64_t max_prefix, cudaStream_t stream) {
  return launch_naive(p, max_prefix, stream);
}
#else
int64_t workspace_bytes(int64_t batch, int64_t nodes, int64_t heads, int64_t multiprocessors, int64_t fixed_split,
                        int64_t max_prefix) {
  return portable_workspace_bytes(static_cast<int32_t>(batch), static_cast<int32_t>(nodes),
                                  static_cast<int32_t>(heads), static_cast<int32_t>(multiprocessors),
                                  static_cast<int32_t>(fixed_split), max_prefix);
}
int64_t prefix_limit(int64_t) { return -1; }  // none
int64_t shared_bytes() { return portable_shared_bytes(); }
cudaError_t launch(const TreeAttentionParams& p, int64_t, cudaStream_t stream) { return launch_portable(p, stream); }
#endif

void check_capacity(const TreeAttentionParams& p, int64_t max_prefix) {
  const int64_t limit = prefix_limit(p.nodes);
  if (limit >= 0 && max_prefix > limit) {
    refuse(kOp, "max_prefix (length of kv_indices unless given)",
           "<= " + std::to_string(limit) + ", as scores must fit in " + std::to_string(shared_bytes()) +
               " bytes of shared memory",
           max_prefix);
  }
  const int64_t bytes =
      workspace_bytes(p.batch, p.nodes, p.heads, p.multiprocessors, p.fixed_split, max_prefix);
  if (p.workspace_bytes < bytes) {
    refuse(kOp, "workspace: dimension 0 (bytes)", ">= " + std::to_string(bytes), p.workspace_bytes);
  }
}

void run(TensorView q_view, TensorView draft_view, TensorView pool_view, TensorView indptr_view,
         TensorView indices_view, Optional<TensorView> mask_view, Optional<TensorView> mask_indptr_view,
         Optional<TensorView> bits_view, TensorView out_view, TensorView lse_view,
         Optional<TensorView> workspace_view, int64_t nodes, double scale, int64_t fixed_split, int64_t max_prefix) {
  const TensorContract q(kOp, "q", q_view), draft(kOp, "draft_kv", draft_view), pool(kOp, "kv_pool", pool_view),
      indptr(kOp, "kv_indptr", indptr_view), indices(kOp, "kv_indices", indices_view), out(kOp, "out", out_view),
      lse(kOp, "lse", lse_view);
  Dim tokens("batch*nodes"), heads("heads"), slots("slots"), latent("latent", kLatent);
  check_query(q, tokens, heads, nodes, scale);
  check_rows(draft, draft_view, tokens);
  check_rows(pool, pool_view, slots);
  Dim pointers("batch + 1", tokens.value() / nodes + 1);
  indptr.rank(1, 1).dim(0, pointers).dtype({host::kInt32, host::kInt64}).contiguous();
  indices.rank(1, 1).dtype({host::kInt32, host::kInt64}).contiguous();
  out.rank(3, 3).dim(0, tokens).dim(1, heads).dim(2, latent).dtype({host::kBf16}).rows(kLatent, kAlignment);
  lse.rank(2, 2).dim(0, tokens).dim(1, heads).dtype({host::kFloat32}).contiguous().aligned(4);
  check_range("batch", tokens.value() / nodes, 0, INT32_MAX / (kMaxNodes * kMaxHeads));
  check_range("batch * nodes * heads", tokens.value() * heads.value(), 0, kMaxRows);
  check_range("fixed_split", fixed_split, 0, INT32_MAX);
  check_range("max_prefix", max_prefix, 0, INT64_MAX);

  TreeAttentionParams p{};
  p.q = q.data();
  p.q_token_stride = q.stride(0);
  p.q_head_stride = q.stride(1);
  p.draft_kv = draft.data();
  p.draft_stride = draft.stride(0);
  p.kv_pool = pool.data();
  p.pool_stride = pool.stride(0);
  p.kv_indptr = indptr.data();
  p.kv_indices = indices.data();
  p.out = out.data();
  p.out_token_stride = out.stride(0);
  p.out_head_stride = out.stride(1);
  p.lse = static_cast<float*>(lse.data());
  p.batch = static_cast<int32_t>(tokens.value() / nodes);
  p.nodes = static_cast<int32_t>(nodes);
  p.heads = static_cast<int32_t>(heads.value());
  p.mask_kind = MaskKind::kCausal;
  p.indptr_is_64 = indptr.is(host::kInt64);
  p.indices_is_64 = indices.is(host::kInt64);
  p.scale = static_cast<float>(scale);
  p.fixed_split = static_cast<int32_t>(fixed_split);
  if (mask_view.has_value() && bits_view.has_value()) refuse(kOp, "mask, tree_bits", "at most one of them", "both");
  if (mask_view.has_value() != mask_indptr_view.has_value()) {
    refuse(kOp, mask_view.has_value() ? "mask_indptr" : "mask", "mask and mask_indptr together", "None");
  }
  if (mask_view.has_value()) {
    check_mask(p, TensorContract(kOp, "mask", mask_view.value()),
               TensorContract(kOp, "mask_indptr", mask_indptr_view.value()), pointers);
  }
  if (bits_view.has_value()) check_bits(p, TensorContract(kOp, "tree_bits", bits_view.value()));
  if (workspace_view.has_value()) {
    const TensorContract workspace(kOp, "workspace", workspace_view.value());
    workspace.rank(1, 1).dtype({host::kUint8}).contiguous().aligned(kAlignment);
    p.workspace = workspace.data();
    p.workspace_bytes = workspace.size(0);
  }

  const DLDevice device = q_view.device();
  for (const TensorContract* one : {&q, &draft, &pool, &indptr, &indices, &out, &lse}) one->on(device);
  if (mask_view.has_value()) {
    TensorContract(kOp, "mask", mask_view.value()).on(device);
    TensorContract(kOp, "mask_indptr", mask_indptr_view.value()).on(device);
  }
  if (bits_view.has_value()) TensorContract(kOp, "tree_bits", bits_view.value()).on(device);
  if (workspace_view.has_value()) TensorContract(kOp, "workspace", workspace_view.value()).on(device);

  p.multiprocessors = host::multiprocessors(kOp, device.device_id);
  p.max_prefix = max_prefix;
  check_capacity(p, max_prefix);
  if (p.batch == 0) return;
  const host::DeviceGuard guard(kOp, device.device_id);
  host::check_cuda(kOp, launch(p, max_prefix, host::current_stream(device)));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_bytes, workspace_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prefix_limit, prefix_limit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shared_bytes, shared_bytes);

}  // namespace treeverify
