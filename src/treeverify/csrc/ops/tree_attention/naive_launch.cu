// Launch of the naive kernel: one block per (token, head).
#include <cuda_runtime.h>

#include "ops/tree_attention/launch.h"
#include "ops/tree_attention/naive_kernel.cuh"

namespace treeverify {

namespace {

constexpr int64_t kLimit = TREEVERIFY_SHARED_LIMIT - static_cast<int64_t>(sizeof(NaiveShared));

int64_t dynamic_bytes(int64_t max_prefix, int32_t nodes) {
  return (max_prefix + nodes) * static_cast<int64_t>(sizeof(float));
}

}  // namespace

int64_t naive_max_prefix(int32_t nodes) { return kLimit / static_cast<int64_t>(sizeof(float)) - nodes; }

int64_t naive_shared_bytes() { return kLimit; }

cudaError_t launch_naive(const TreeAttentionParams& params, int64_t max_prefix, cudaStream_t stream) {
  const int64_t blocks = int64_t{params.batch} * params.nodes * params.heads;
  if (blocks == 0) return cudaSuccess;
  const int64_t bytes = dynamic_bytes(max_prefix, params.nodes);
  if (max_prefix < 0 || bytes > kLimit || blocks > INT32_MAX) return cudaErrorInvalidValue;
  const cudaError_t status = cudaFuncSetAttribute(
      smxx_bf16_tree_attention_naive, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kLimit));
  if (status != cudaSuccess) return status;
  smxx_bf16_tree_attention_naive<<<static_cast<unsigned>(blocks), kNaiveThreads, static_cast<size_t>(bytes), stream>>>(
      params, max_prefix);
  return cudaGetLastError();
}

}  // namespace treeverify
