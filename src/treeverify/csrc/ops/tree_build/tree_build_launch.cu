// Launch of tree_build: one warp per request.
#include <cuda_runtime.h>

#include "ops/tree_build/launch.h"
#include "ops/tree_build/tree_build_kernel.cuh"

namespace treeverify {

cudaError_t launch_tree_build(const TreeBuildParams& params, cudaStream_t stream) {
  if (params.batch == 0) return cudaSuccess;
  smxx_tree_build<<<static_cast<unsigned>(params.batch), 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace treeverify
