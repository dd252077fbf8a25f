// tree_build: tensors to TreeBuildParams. Nothing is launched, and no device touched, before every check has passed.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "host/arguments.h"
#include "ops/tree_build/launch.h"
#include "ops/tree_build/params.h"

namespace treeverify {

namespace {

using host::Dim;
using tvm::ffi::TensorView;

void tree_build(TensorView log_probs, TensorView token_ids, TensorView roots, TensorView tokens, TensorView parents,
                TensorView depths, TensorView scores, TensorView widths) {
  host::Arguments call("tree_build");
  Dim batch("batch"), depth("depth"), k("k"), width("width");
  TreeBuildParams p{};
  p.log_probs = static_cast<const float*>(
      call.dense("log_probs", log_probs, {&batch, &depth, &k}, {host::kFloat32}));
  p.token_ids = static_cast<const int64_t*>(
      call.dense("token_ids", token_ids, {&batch, &depth, &k}, {host::kInt64}));
  p.roots = static_cast<const int64_t*>(call.dense("roots", roots, {&batch}, {host::kInt64}));
  p.tokens = static_cast<int64_t*>(call.dense("tokens", tokens, {&batch, &width}, {host::kInt64}));
  p.parents = static_cast<int32_t*>(call.dense("parents", parents, {&batch, &width}, {host::kInt32}));
  p.depths = static_cast<int32_t*>(call.dense("depths", depths, {&batch, &width}, {host::kInt32}));
  p.scores = static_cast<float*>(call.dense("scores", scores, {&batch, &width}, {host::kFloat32}));
  p.widths = static_cast<int32_t*>(call.dense("widths", widths, {&batch}, {host::kInt32}));
  call.range("log_probs: dimension 0 (batch)", batch.value(), 0, INT32_MAX);
  call.range("log_probs: dimension 1 (depth)", depth.value(), 0, kMaxDepth);
  call.range("log_probs: dimension 2 (k)", k.value(), 0, kMaxCandidates);
  call.range("tokens: dimension 1 (width)", width.value(), 1, kMaxBudget + 1);
  p.batch = static_cast<int32_t>(batch.value());
  p.depth = static_cast<int32_t>(depth.value());
  p.k = static_cast<int32_t>(k.value());
  p.width = static_cast<int32_t>(width.value());
  call.run([&](cudaStream_t stream) { return launch_tree_build(p, stream); });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(tree_build, tree_build);

}  // namespace treeverify
