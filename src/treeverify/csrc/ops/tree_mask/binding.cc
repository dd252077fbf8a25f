// tree_mask: tensors to TreeMaskParams. Nothing is launched, and no device touched, before every check has passed.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "host/arguments.h"
#include "ops/tree_mask/launch.h"
#include "ops/tree_mask/params.h"

namespace treeverify {

namespace {

using host::Dim;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

constexpr const char* kOp = "tree_mask";

// A flat mask of at least `cells` cells.
uint8_t* mask_of(host::Arguments& call, const char* name, const Optional<TensorView>& view, int64_t cells) {
  if (!view.has_value()) return nullptr;
  Dim size("cells");
  void* data = call.dense(name, view.value(), {&size}, {host::kBool, host::kUint8});
  if (size.value() < cells) {
    host::refuse(kOp, std::string(name) + ": dimension 0 (cells)", ">= " + std::to_string(cells), size.value());
  }
  return static_cast<uint8_t*>(data);
}

void tree_mask(TensorView parents, TensorView prefix_lengths, Optional<TensorView> bits,
               Optional<TensorView> positions, Optional<TensorView> full_mask, Optional<TensorView> qlen_mask,
               Optional<TensorView> retrieve) {
  host::Arguments call(kOp);
  Dim batch("batch"), width("width");
  TreeMaskParams p{};
  p.parents = static_cast<const int32_t*>(call.dense("parents", parents, {&batch, &width}, {host::kInt32}));
  p.prefix_lengths = call.dense("prefix_lengths", prefix_lengths, {&batch}, {host::kInt32, host::kInt64});
  p.prefix_is_64 = host::same_dtype(prefix_lengths.dtype(), host::kInt64);
  call.range("parents: dimension 0 (batch)", batch.value(), 0, INT32_MAX / (kMaxMaskWidth * kMaxMaskWidth));
  call.range("parents: dimension 1 (width)", width.value(), 1, kMaxMaskWidth);
  Dim words("words", (width.value() + 63) / 64), tokens("batch * width", batch.value() * width.value());
  Dim planes("planes", 3);
  if (bits.has_value()) {
    p.bits = static_cast<uint64_t*>(
        call.dense("bits", bits.value(), {&batch, &width, &words}, {host::kInt64, host::kUint64}));
  }
  if (positions.has_value()) {
    p.positions = static_cast<int64_t*>(call.dense("positions", positions.value(), {&tokens}, {host::kInt64}));
  }
  const int64_t cells = tokens.value() * width.value();
  p.full_mask = mask_of(call, "full_mask", full_mask, cells);
  p.qlen_mask = mask_of(call, "qlen_mask", qlen_mask, cells);
  if (retrieve.has_value()) {
    p.retrieve = static_cast<int64_t*>(
        call.dense("retrieve", retrieve.value(), {&planes, &batch, &width}, {host::kInt64}));
  }
  p.batch = static_cast<int32_t>(batch.value());
  p.width = static_cast<int32_t>(width.value());
  call.run([&](cudaStream_t stream) { return launch_tree_mask(p, stream); });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(tree_mask, tree_mask);

}  // namespace treeverify
