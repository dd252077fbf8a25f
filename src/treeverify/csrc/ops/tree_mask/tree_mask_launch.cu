// Launch of tree_mask: one block per request.
#include <cuda_runtime.h>

#include "ops/tree_mask/launch.h"
#include "ops/tree_mask/tree_mask_kernel.cuh"

namespace treeverify {

cudaError_t launch_tree_mask(const TreeMaskParams& params, cudaStream_t stream) {
  if (params.batch == 0) return cudaSuccess;
  smxx_tree_mask<<<static_cast<unsigned>(params.batch), kMaskThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace treeverify
