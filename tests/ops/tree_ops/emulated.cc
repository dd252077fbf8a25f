// The tree operators as a shared library for ctypes: launch code and kernels are the product's, in a copy of csrc in which
// kernel<<<grid, threads, 0, stream>>>(arguments) reads emulator::launch(grid, threads, [&] { kernel(arguments); }).
#include "cuda.h"

namespace emulator {

template <class Body>
void launch(unsigned blocks, int threads, Body body) {
  for (unsigned index = 0; index < blocks; ++index) run_block(body, index, blocks, threads);
}

}  // namespace emulator

#include "ops/draft_topk/draft_topk_launch.cu"
#include "ops/draft_window/draft_window_launch.cu"
#include "ops/feature_gather/feature_gather_launch.cu"
#include "ops/kv_compact/kv_compact_launch.cu"
#include "ops/tree_accept/tree_accept_launch.cu"
#include "ops/tree_build/tree_build_launch.cu"
#include "ops/tree_mask/tree_mask_launch.cu"

using namespace treeverify;

extern "C" {

cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int*) { return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 20;  // multiprocessors: groups of two for nine requests
  return cudaSuccess;
}

cudaError_t cudaMemset2DAsync(void* target, size_t pitch, int value, size_t width, size_t height, cudaStream_t) {
  for (size_t row = 0; row < height; ++row) memset(static_cast<char*>(target) + row * pitch, value, width);
  return cudaSuccess;
}

cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 blocks, dim3 threads, void** arguments, size_t,
                                        cudaStream_t) {
  using SampledKernel = void(TreeAcceptSampledParams);  // the only ones that are launched so
  auto* run = reinterpret_cast<SampledKernel*>(const_cast<void*>(kernel));
  const auto* p = static_cast<const TreeAcceptSampledParams*>(arguments[0]);
  emulator::run_together([=] { run(*p); }, blocks.x, static_cast<int>(threads.x));
  return cudaSuccess;
}

int topk_tiles(const TopkTileParams* p) { return launch_topk_tiles(*p, nullptr); }
int topk_merge(const TopkMergeParams* p) { return launch_topk_merge(*p, nullptr); }
int draft_window(const DraftWindowParams* p) { return launch_draft_window(*p, nullptr); }
int feature_gather(const FeatureGatherParams* p) { return launch_feature_gather(*p, nullptr); }
int kv_compact(const KvCompactParams* p) { return launch_kv_compact(*p, nullptr); }
int tree_accept(const TreeAcceptParams* p) { return launch_tree_accept(*p, nullptr); }
int tree_accept_sampled(const TreeAcceptSampledParams* p) { return launch_tree_accept_sampled(*p, nullptr); }
int tree_build(const TreeBuildParams* p) { return launch_tree_build(*p, nullptr); }
int tree_mask(const TreeMaskParams* p) { return launch_tree_mask(*p, nullptr); }

}  // extern "C"
