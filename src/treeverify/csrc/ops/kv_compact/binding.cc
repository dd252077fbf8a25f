// kv_compact: tensors to KvCompactParams. Nothing is launched, and no device touched, before every check has passed.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "host/arguments.h"
#include "ops/kv_compact/launch.h"
#include "ops/kv_compact/params.h"

namespace treeverify {

namespace {

using host::Dim;
using tvm::ffi::TensorView;

constexpr const char* kOp = "kv_compact";

void kv_compact(TensorView pools, TensorView slots, TensorView path, TensorView lengths, int64_t row_bytes,
                int64_t stride_bytes, int64_t unit) {
  host::Arguments call(kOp);
  Dim layers("layers"), batch("batch"), width("width"), columns("depth + 1");
  KvCompactParams p{};
  p.pools = static_cast<const int64_t*>(call.dense("pools", pools, {&layers}, {host::kInt64}));
  p.slots = call.dense("slots", slots, {&batch, &width}, {host::kInt32, host::kInt64});
  p.slots_is_64 = host::same_dtype(slots.dtype(), host::kInt64);
  p.path = static_cast<const int32_t*>(call.dense("path", path, {&batch, &columns}, {host::kInt32}));
  p.lengths = static_cast<const int32_t*>(call.dense("lengths", lengths, {&batch}, {host::kInt32}));
  call.range("pools: dimension 0 (layers)", layers.value(), 0, INT32_MAX);
  call.range("slots: dimension 0 (batch)", batch.value(), 0, INT32_MAX);
  call.range("slots: dimension 1 (width)", width.value(), 1, kMaxCompactWidth);
  call.range("path: dimension 1 (depth + 1)", columns.value(), 1, kMaxCompactWidth);
  call.range("unit", unit, 1, 16);
  if ((unit & (unit - 1)) != 0) host::refuse(kOp, "unit", "a power of 2", unit);
  if (row_bytes < 0 || row_bytes % unit != 0) {
    host::refuse(kOp, "row_bytes", "a multiple of unit = " + std::to_string(unit), row_bytes);
  }
  if (stride_bytes < row_bytes || stride_bytes % unit != 0) {
    host::refuse(kOp, "stride_bytes", ">= row_bytes and a multiple of unit", stride_bytes);
  }
  p.row_bytes = row_bytes;
  p.stride_bytes = stride_bytes;
  p.layers = static_cast<int32_t>(layers.value());
  p.batch = static_cast<int32_t>(batch.value());
  p.width = static_cast<int32_t>(width.value());
  p.columns = static_cast<int32_t>(columns.value());
  p.unit = static_cast<int32_t>(unit);
  call.run([&](cudaStream_t stream) { return launch_kv_compact(p, stream); });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kv_compact, kv_compact);

}  // namespace treeverify
