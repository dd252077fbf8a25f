// Refusals, CUDA status, device and stream: what every binding needs around a launch.
#pragma once

#include <cuda_runtime.h>
#include <sstream>
#include <string>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

namespace treeverify::host {

// Raise ValueError "operator: what: expected X, got Y", the text of ContractError in Python.
template <typename Expected, typename Got>
[[noreturn]] void refuse(const char* op, const std::string& what, const Expected& expected, const Got& got) {
  std::ostringstream text;
  text << op << ": " << what << ": expected " << expected << ", got " << got;
  throw tvm::ffi::Error("ValueError", text.str(), "");
}

// Raise RuntimeError for a failed CUDA call.
inline void check_cuda(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return;
  std::ostringstream text;
  text << op << ": launch failed: " << cudaGetErrorName(status) << ": " << cudaGetErrorString(status);
  throw tvm::ffi::Error("RuntimeError", text.str(), "");
}

// Makes `device` current, and the former one again at the end.
class DeviceGuard {
 public:
  DeviceGuard(const char* op, int device) {
    check_cuda(op, cudaGetDevice(&before_));
    changed_ = before_ != device;
    if (changed_) check_cuda(op, cudaSetDevice(device));
  }
  ~DeviceGuard() {
    if (changed_) static_cast<void>(cudaSetDevice(before_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// The caller's current stream: tvm-ffi takes it from torch when it converts the tensors of a call.
inline cudaStream_t current_stream(DLDevice device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

inline int multiprocessors(const char* op, int device) {
  int count = 0;
  check_cuda(op, cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

}  // namespace treeverify::host
