// Checks of one tensor argument, with named dimensions. Each refusal says operator, tensor, dimension, expected, got.
//
// Use in this order: rank, dim, dtype, layout, and the device of all tensors last, so that everything but the device can
// be tested with tensors in host memory.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>

#include "host/check.h"

namespace treeverify::host {

constexpr DLDataType kBf16{kDLBfloat, 16, 1};
constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kFloat16{kDLFloat, 16, 1};
constexpr DLDataType kFloat64{kDLFloat, 64, 1};
constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kInt64{kDLInt, 64, 1};
constexpr DLDataType kUint64{kDLUInt, 64, 1};
constexpr DLDataType kUint8{kDLUInt, 8, 1};
constexpr DLDataType kBool{kDLBool, 8, 1};

inline bool same_dtype(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

// A dimension by name: known from the start, or bound by the first tensor that shows it.
class Dim {
 public:
  explicit Dim(const char* name) : name_(name) {}
  Dim(const char* name, int64_t value) : name_(name), value_(value), bound_(true) {}
  const char* name() const { return name_; }
  int64_t value() const { return value_; }
  bool bound() const { return bound_; }
  void bind(int64_t value) {
    value_ = value;
    bound_ = true;
  }

 private:
  const char* name_;
  int64_t value_ = 0;
  bool bound_ = false;
};

class TensorContract {
 public:
  TensorContract(const char* op, const char* name, const tvm::ffi::TensorView& tensor)
      : op_(op), name_(name), tensor_(tensor) {}

  const TensorContract& rank(int low, int high) const {
    if (tensor_.ndim() >= low && tensor_.ndim() <= high) return *this;
    std::string expected = std::to_string(low);
    if (high != low) expected += " or " + std::to_string(high);
    refuse(op_, part("rank"), expected, std::to_string(tensor_.ndim()) + " " + shape());
  }

  // Size of dimension `index` (negative: from the end).
  const TensorContract& dim(int index, Dim& dim) const {
    const int at = index < 0 ? tensor_.ndim() + index : index;
    const int64_t got = tensor_.size(at);
    if (!dim.bound()) {
      dim.bind(got);
    } else if (got != dim.value()) {
      refuse(op_, dimension(at, dim.name()), dim.value(), got);
    }
    return *this;
  }

  const TensorContract& at_least(int index, const Dim& dim) const {
    if (tensor_.size(index) < dim.value()) {
      refuse(op_, dimension(index, dim.name()), ">= " + std::to_string(dim.value()), tensor_.size(index));
    }
    return *this;
  }

  const TensorContract& dtype(std::initializer_list<DLDataType> allowed) const {
    const DLDataType got = tensor_.dtype();
    std::string expected;
    for (const DLDataType& one : allowed) {
      if (same_dtype(one, got)) return *this;
      expected += (expected.empty() ? "" : " or ") + dtype_name(one);
    }
    const bool fp8 = got.bits == 8 && got.code > kDLBool;  // DLPack numbers the fp8 kinds after bool
    refuse(op_, part("dtype"), expected, dtype_name(got) + (fp8 ? " (fp8 KV is not supported yet)" : ""));
  }

  // Rows of `row` elements: the last dimension contiguous, every other stride at least a row and, like the address, a
  // multiple of `alignment` bytes. Strides of dimensions of size 1 mean nothing.
  const TensorContract& rows(int64_t row, int64_t alignment) const {
    const int last = tensor_.ndim() - 1;
    if (tensor_.size(last) > 1 && tensor_.stride(last) != 1) {
      refuse(op_, part("stride of the last dimension"), 1, tensor_.stride(last));
    }
    const int64_t bytes = tensor_.dtype().bits / 8;
    for (int i = 0; i < last; ++i) {
      if (tensor_.size(i) > 1 && (tensor_.stride(i) < row || tensor_.stride(i) * bytes % alignment != 0)) {
        refuse(op_, part("stride of dimension " + std::to_string(i)),
               ">= " + std::to_string(row) + " elements and a multiple of " + std::to_string(alignment) + " bytes",
               tensor_.stride(i));
      }
    }
    return aligned(alignment);
  }

  const TensorContract& contiguous() const {
    if (tensor_.numel() == 0 || tensor_.IsContiguous()) return *this;  // strides of an empty tensor mean nothing
    if (tensor_.ndim() == 1) refuse(op_, part("stride of dimension 0"), 1, tensor_.stride(0));
    refuse(op_, part("strides"), "contiguous", list(tensor_.strides()));
  }

  const TensorContract& aligned(int64_t alignment) const {
    const auto address = reinterpret_cast<uintptr_t>(data());
    if (tensor_.numel() == 0 || address % static_cast<uintptr_t>(alignment) == 0) return *this;
    std::ostringstream got;
    got << "0x" << std::hex << address;
    refuse(op_, part("address"), "a multiple of " + std::to_string(alignment) + " bytes", got.str());
  }

  // On the GPU `device`, that of the tensor `first`.
  const TensorContract& on(DLDevice device, const char* first = "q") const {
    const DLDevice got = tensor_.device();
    if (got.device_type != kDLCUDA) refuse(op_, part("device"), "cuda", device_name(got));
    if (got.device_id != device.device_id) {
      refuse(op_, part("device"), device_name(device) + " (that of " + first + ")", device_name(got));
    }
    return *this;
  }

  void* data() const { return static_cast<char*>(tensor_.data_ptr()) + tensor_.byte_offset(); }
  bool is(DLDataType dtype) const { return same_dtype(tensor_.dtype(), dtype); }
  int64_t size(int index) const { return tensor_.size(index); }
  int64_t stride(int index) const { return tensor_.stride(index); }

 private:
  std::string part(const std::string& what) const { return std::string(name_) + ": " + what; }
  std::string dimension(int index, const char* name) const {
    return part("dimension " + std::to_string(index) + " (" + name + ")");
  }
  std::string shape() const { return list(tensor_.shape()); }
  static std::string list(const tvm::ffi::ShapeView& values) {
    std::string text = "[";
    for (int64_t value : values) text += (text.size() > 1 ? ", " : "") + std::to_string(value);
    return text + "]";
  }
  static std::string dtype_name(DLDataType dtype) {
    return static_cast<std::string>(tvm::ffi::DLDataTypeToString(dtype));
  }
  static std::string device_name(DLDevice device) {
    const std::string kind = device.device_type == kDLCPU    ? "cpu"
                             : device.device_type == kDLCUDA ? "cuda"
                                                             : "device type " + std::to_string(device.device_type);
    return kind == "cuda" ? kind + ":" + std::to_string(device.device_id) : kind;
  }

  const char* op_;
  const char* name_;
  tvm::ffi::TensorView tensor_;
};

}  // namespace treeverify::host
