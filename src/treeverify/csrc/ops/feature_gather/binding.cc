// feature_gather: tensors to FeatureGatherParams. Nothing is launched, and no device touched, before every check has
// passed.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "host/arguments.h"
#include "ops/feature_gather/launch.h"
#include "ops/feature_gather/params.h"

namespace treeverify {

namespace {

using host::Dim;
using tvm::ffi::TensorView;

void feature_gather(TensorView features, TensorView path, TensorView lengths, TensorView slots,
                    TensorView prefix_lengths, TensorView packed, TensorView packed_slots, TensorView positions) {
  host::Arguments call("feature_gather");
  Dim batch("batch"), rows("rows"), width("width"), columns("depth + 1"), dim("dim");
  FeatureGatherParams p{};
  p.slots = call.dense("slots", slots, {&batch, &width}, {host::kInt32, host::kInt64});
  p.slots_is_64 = host::same_dtype(slots.dtype(), host::kInt64);
  Dim tokens("batch * width", batch.value() * width.value());
  p.features = static_cast<const char*>(
      call.rows("features", features, {&tokens, &dim}, {host::kBf16, host::kFloat16, host::kFloat32}));
  p.path = static_cast<const int32_t*>(call.dense("path", path, {&batch, &columns}, {host::kInt32}));
  p.lengths = static_cast<const int32_t*>(call.dense("lengths", lengths, {&batch}, {host::kInt32}));
  p.prefix_lengths = call.dense("prefix_lengths", prefix_lengths, {&batch}, {host::kInt32, host::kInt64});
  p.prefix_is_64 = host::same_dtype(prefix_lengths.dtype(), host::kInt64);
  p.packed = static_cast<char*>(call.dense("packed", packed, {&rows, &columns, &dim}, {features.dtype()}));
  p.packed_slots = static_cast<int64_t*>(call.dense("packed_slots", packed_slots, {&rows, &columns}, {host::kInt64}));
  p.positions = static_cast<int64_t*>(call.dense("positions", positions, {&rows, &columns}, {host::kInt64}));
  call.range("slots: dimension 0 (batch)", batch.value(), 0, INT32_MAX / kMaxGatherWidth);
  call.range("packed: dimension 0 (rows)", rows.value(), batch.value(), INT32_MAX / kMaxGatherWidth);
  call.range("slots: dimension 1 (width)", width.value(), 1, kMaxGatherWidth);
  call.range("path: dimension 1 (depth + 1)", columns.value(), 1, kMaxGatherWidth);
  const int64_t size = features.dtype().bits / 8;
  p.row_bytes = dim.value() * size;
  p.stride_bytes = tokens.value() > 1 ? features.stride(0) * size : p.row_bytes;
  p.rows = static_cast<int32_t>(rows.value());
  p.batch = static_cast<int32_t>(batch.value());
  p.width = static_cast<int32_t>(width.value());
  p.columns = static_cast<int32_t>(columns.value());
  call.run([&](cudaStream_t stream) { return launch_feature_gather(p, stream); });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(feature_gather, feature_gather);

}  // namespace treeverify
