// The tensors of one call: each is checked for rank, dimensions, dtype and layout as it comes, and all of them for their
// device at the end, so that everything but the device can be tested with tensors in host memory.
#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include "host/check.h"
#include "host/tensor_contract.h"

namespace treeverify::host {

class Arguments {
 public:
  explicit Arguments(const char* op) : op_(op) {}

  // A contiguous tensor of one of `dtypes`, with these dimensions.
  void* dense(const char* name, const tvm::ffi::TensorView& view, std::initializer_list<Dim*> dims,
              std::initializer_list<DLDataType> dtypes) {
    const TensorContract contract = sized(name, view, dims, dtypes);
    contract.contiguous();
    return contract.data();
  }

  // The same, but only the rows (the last dimension) must be contiguous.
  void* rows(const char* name, const tvm::ffi::TensorView& view, std::initializer_list<Dim*> dims,
             std::initializer_list<DLDataType> dtypes) {
    const TensorContract contract = sized(name, view, dims, dtypes);
    contract.rows(view.size(view.ndim() - 1), 1);
    return contract.data();
  }

  void range(const char* what, int64_t got, int64_t low, int64_t high) const {
    if (got < low || got > high) refuse(op_, what, std::to_string(low) + ".." + std::to_string(high), got);
  }

  // The GPU that all tensors are on.
  DLDevice device() const {
    const DLDevice first = seen_.front().second.device();
    for (const auto& [name, view] : seen_) TensorContract(op_, name, view).on(first, seen_.front().first);
    return first;
  }

  // Runs `launch(stream)` on that GPU's current stream.
  template <class Launch>
  void run(Launch launch) const {
    const DLDevice where = device();
    const DeviceGuard guard(op_, where.device_id);
    check_cuda(op_, launch(current_stream(where)));
  }

 private:
  TensorContract sized(const char* name, const tvm::ffi::TensorView& view, std::initializer_list<Dim*> dims,
                       std::initializer_list<DLDataType> dtypes) {
    const int rank = static_cast<int>(dims.size());
    const TensorContract contract(op_, name, view);
    contract.rank(rank, rank).dtype(dtypes);
    int index = 0;
    for (Dim* dim : dims) contract.dim(index++, *dim);
    contract.aligned(view.dtype().bits / 8);
    seen_.emplace_back(name, view);
    return contract;
  }

  const char* op_;
  std::vector<std::pair<const char*, tvm::ffi::TensorView>> seen_;
};

}  // namespace treeverify::host
