// Launch of feature_gather: a block per part of a packed row.
#include <cuda_runtime.h>

#include "ops/feature_gather/feature_gather_kernel.cuh"
#include "ops/feature_gather/launch.h"

namespace treeverify {

namespace {

template <class Unit>
cudaError_t launch(const FeatureGatherParams& params, cudaStream_t stream) {
  const int64_t parts = params.row_bytes == 0 ? 1 : (params.row_bytes + kPartBytes - 1) / kPartBytes;
  const int64_t blocks = int64_t{params.rows} * params.columns * parts;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  smxx_feature_gather<Unit><<<static_cast<unsigned>(blocks), kGatherThreads, 0, stream>>>(
      params, static_cast<int32_t>(parts));
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_feature_gather(const FeatureGatherParams& params, cudaStream_t stream) {
  const int64_t together = params.row_bytes | params.stride_bytes | reinterpret_cast<int64_t>(params.features) |
                           reinterpret_cast<int64_t>(params.packed);
  if (together % 16 == 0) return launch<uint4>(params, stream);
  if (together % 4 == 0) return launch<uint32_t>(params, stream);
  return launch<uint8_t>(params, stream);
}

}  // namespace treeverify
