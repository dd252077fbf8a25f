// Launches of the walks: greedy, one warp per request; sampled, one block per request.
#include <cuda_runtime.h>

#include "ops/tree_accept/launch.h"
#include "ops/tree_accept/tree_accept_kernel.cuh"
#include "ops/tree_accept/tree_accept_sampled_kernel.cuh"

namespace treeverify {

cudaError_t launch_tree_accept(const TreeAcceptParams& params, cudaStream_t stream) {
  if (params.batch == 0) return cudaSuccess;
  smxx_tree_accept<<<static_cast<unsigned>(params.batch), 32, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_tree_accept_sampled(const TreeAcceptSampledParams& params, cudaStream_t stream) {
  const auto batch = static_cast<unsigned>(params.tree.batch);
  if (batch == 0) return cudaSuccess;
  if (params.is_bf16) {
    smxx_tree_accept_sampled<__nv_bfloat16><<<batch, kDrawThreads, 0, stream>>>(params);
  } else {
    smxx_tree_accept_sampled<float><<<batch, kDrawThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace treeverify
