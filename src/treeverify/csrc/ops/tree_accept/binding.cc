// tree_accept and tree_accept_sampled: tensors to parameters. Nothing is launched, and no device touched, before every
// check has passed.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "host/arguments.h"
#include "ops/tree_accept/launch.h"
#include "ops/tree_accept/params.h"

namespace treeverify {

namespace {

using host::Dim;
using tvm::ffi::TensorView;

struct Sizes {
  Dim batch{"batch"}, width{"width"}, columns{"depth + 1"};
};

TreeAcceptParams tree_params(host::Arguments& call, Sizes& z, TensorView tokens, TensorView parents, TensorView path,
                             TensorView lengths, TensorView new_tokens, TensorView bonus) {
  TreeAcceptParams p{};
  p.tokens = static_cast<const int64_t*>(call.dense("tokens", tokens, {&z.batch, &z.width}, {host::kInt64}));
  p.parents = static_cast<const int32_t*>(call.dense("parents", parents, {&z.batch, &z.width}, {host::kInt32}));
  p.path = static_cast<int32_t*>(call.dense("path", path, {&z.batch, &z.columns}, {host::kInt32}));
  p.lengths = static_cast<int32_t*>(call.dense("lengths", lengths, {&z.batch}, {host::kInt32}));
  p.new_tokens = static_cast<int64_t*>(call.dense("new_tokens", new_tokens, {&z.batch, &z.width}, {host::kInt64}));
  p.bonus = static_cast<int64_t*>(call.dense("bonus", bonus, {&z.batch}, {host::kInt64}));
  call.range("tokens: dimension 0 (batch)", z.batch.value(), 0, INT32_MAX);
  call.range("tokens: dimension 1 (width)", z.width.value(), 1, kMaxAcceptWidth);
  call.range("path: dimension 1 (depth + 1)", z.columns.value(), 1, kMaxAcceptWidth);
  p.batch = static_cast<int32_t>(z.batch.value());
  p.width = static_cast<int32_t>(z.width.value());
  p.columns = static_cast<int32_t>(z.columns.value());
  return p;
}

void tree_accept(TensorView tokens, TensorView parents, TensorView samples, TensorView path, TensorView lengths,
                 TensorView new_tokens, TensorView bonus) {
  host::Arguments call("tree_accept");
  Sizes z;
  TreeAcceptParams p = tree_params(call, z, tokens, parents, path, lengths, new_tokens, bonus);
  p.samples = static_cast<const int64_t*>(call.dense("samples", samples, {&z.batch, &z.width}, {host::kInt64}));
  call.run([&](cudaStream_t stream) { return launch_tree_accept(p, stream); });
}

void tree_accept_sampled(TensorView tokens, TensorView parents, TensorView logits, TensorView temperature,
                         TensorView top_k, TensorView top_p, TensorView min_p, TensorView uniforms,
                         TensorView workspace, TensorView path, TensorView lengths, TensorView new_tokens,
                         TensorView bonus) {
  host::Arguments call("tree_accept_sampled");
  Sizes z;
  TreeAcceptSampledParams p{};
  p.tree = tree_params(call, z, tokens, parents, path, lengths, new_tokens, bonus);
  Dim rows("batch * width", z.batch.value() * z.width.value()), vocab("vocab");
  p.logits = call.rows("logits", logits, {&rows, &vocab}, {host::kFloat32, host::kBf16});
  p.logits_stride = rows.value() > 1 ? logits.stride(0) : vocab.value();
  p.is_bf16 = host::same_dtype(logits.dtype(), host::kBf16);
  call.range("logits: dimension 1 (vocab)", vocab.value(), 1, kMaxVocab);
  p.vocab = static_cast<int32_t>(vocab.value());
  p.temperature = static_cast<const float*>(call.dense("temperature", temperature, {&z.batch}, {host::kFloat32}));
  p.top_k = static_cast<const int32_t*>(call.dense("top_k", top_k, {&z.batch}, {host::kInt32}));
  p.top_p = static_cast<const float*>(call.dense("top_p", top_p, {&z.batch}, {host::kFloat32}));
  p.min_p = static_cast<const float*>(call.dense("min_p", min_p, {&z.batch}, {host::kFloat32}));
  p.uniforms = static_cast<const double*>(
      call.dense("uniforms", uniforms, {&z.batch, &z.columns}, {host::kFloat64}));
  Dim elements("elements");
  p.groups = call.dense("workspace", workspace, {&elements}, {host::kInt64});
  const int64_t least = z.batch.value() * kDrawGroupBytes / static_cast<int64_t>(sizeof(int64_t));
  if (elements.value() < least) {
    host::refuse("tree_accept_sampled", "workspace: dimension 0 (elements)", ">= " + std::to_string(least),
                 elements.value());
  }
  call.run([&](cudaStream_t stream) { return launch_tree_accept_sampled(p, stream); });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(tree_accept, tree_accept);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tree_accept_sampled, tree_accept_sampled);

}  // namespace treeverify
