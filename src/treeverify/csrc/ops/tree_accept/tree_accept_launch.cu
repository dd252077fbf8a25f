// Launches of the walks: greedy, one warp per request; sampled, a group of blocks per request.
#include <algorithm>
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

namespace {

// Blocks for each request: no more than run at once, one on a multiprocessor, as they wait for each other.
cudaError_t group_size(const TreeAcceptSampledParams& p, int& blocks) {
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int segments = (p.vocab + kSegment - 1) / kSegment;
  blocks = std::max(1, std::min({processors / p.tree.batch, segments, kMaxGroup}));
  return status;
}

// A cooperative launch starts only when all blocks can run.
template <class Kernel>
cudaError_t launch_together(Kernel* kernel, TreeAcceptSampledParams& params, cudaStream_t stream) {
  const cudaError_t status = cudaMemset2DAsync(params.groups, sizeof(DrawGroup), 0, sizeof(DrawGroup::arrived),
                                               static_cast<size_t>(params.tree.batch), stream);
  if (status != cudaSuccess) return status;
  void* arguments[] = {&params};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(params.tree.batch * params.blocks),
                                     dim3(kDrawThreads), arguments, 0, stream);
}

}  // namespace

cudaError_t launch_tree_accept_sampled(const TreeAcceptSampledParams& params, cudaStream_t stream) {
  const auto batch = static_cast<unsigned>(params.tree.batch);
  if (batch == 0) return cudaSuccess;
  TreeAcceptSampledParams own = params;
  const cudaError_t status = group_size(own, own.blocks);
  if (status != cudaSuccess) return status;
  if (own.blocks > 1) {
    return own.is_bf16 ? launch_together(&smxx_tree_accept_sampled<__nv_bfloat16>, own, stream)
                       : launch_together(&smxx_tree_accept_sampled<float>, own, stream);
  }
  if (own.is_bf16) {
    smxx_tree_accept_sampled<__nv_bfloat16><<<batch, kDrawThreads, 0, stream>>>(own);
  } else {
    smxx_tree_accept_sampled<float><<<batch, kDrawThreads, 0, stream>>>(own);
  }
  return cudaGetLastError();
}

}  // namespace treeverify
