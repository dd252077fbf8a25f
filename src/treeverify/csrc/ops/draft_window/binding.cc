// draft_window: tensors to DraftWindowParams. Nothing is launched, and no device touched, before every check has passed.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "host/arguments.h"
#include "ops/draft_window/launch.h"
#include "ops/draft_window/params.h"

namespace treeverify {

namespace {

using host::Dim;
using tvm::ffi::TensorView;

void draft_window(TensorView request_rows, TensorView lengths, TensorView slot_table, TensorView roots,
                  int64_t mask_token, TensorView slots, TensorView block_slots, TensorView ids, TensorView positions) {
  host::Arguments call("draft_window");
  Dim batch("batch"), rows("rows"), columns("columns"), width("width"), block("block");
  DraftWindowParams p{};
  const auto integers = [&](const char* name, TensorView view, bool& is_64) {
    is_64 = host::same_dtype(view.dtype(), host::kInt64);
    return call.dense(name, view, {&batch}, {host::kInt32, host::kInt64});
  };
  const auto made = [&](const char* name, TensorView view, Dim& size) {
    return static_cast<int64_t*>(call.dense(name, view, {&batch, &size}, {host::kInt64}));
  };
  p.request_rows = integers("request_rows", request_rows, p.rows_is_64);
  p.lengths = integers("lengths", lengths, p.lengths_is_64);
  p.slot_table =
      static_cast<const int32_t*>(call.dense("slot_table", slot_table, {&rows, &columns}, {host::kInt32}));
  p.roots = integers("roots", roots, p.roots_is_64);
  p.slots = made("slots", slots, width);
  p.block_slots = made("block_slots", block_slots, block);
  p.ids = made("ids", ids, block);
  p.positions = made("positions", positions, block);
  call.range("request_rows: dimension 0 (batch)", batch.value(), 0, INT32_MAX / kMaxWindowWidth);
  call.range("slots: dimension 1 (width)", width.value(), 1, kMaxWindowWidth);
  call.range("block_slots: dimension 1 (block)", block.value(), 1, width.value());
  call.range("mask_token", mask_token, 0, INT32_MAX);
  p.rows = rows.value();
  p.columns = columns.value();
  p.mask_token = mask_token;
  p.batch = static_cast<int32_t>(batch.value());
  p.width = static_cast<int32_t>(width.value());
  p.block = static_cast<int32_t>(block.value());
  call.run([&](cudaStream_t stream) { return launch_draft_window(p, stream); });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(draft_window, draft_window);

}  // namespace treeverify
