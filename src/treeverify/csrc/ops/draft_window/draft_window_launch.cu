// Launch of draft_window: a block per request.
#include <cuda_runtime.h>

#include "ops/draft_window/draft_window_kernel.cuh"
#include "ops/draft_window/launch.h"

namespace treeverify {

cudaError_t launch_draft_window(const DraftWindowParams& params, cudaStream_t stream) {
  if (params.batch == 0) return cudaSuccess;
  smxx_draft_window<<<static_cast<unsigned>(params.batch), kWindowThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace treeverify
