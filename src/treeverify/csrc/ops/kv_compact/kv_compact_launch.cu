// Launch of kv_compact: one thread per unit of a row, layer and request.
#include <cuda_runtime.h>

#include "ops/kv_compact/kv_compact_kernel.cuh"
#include "ops/kv_compact/launch.h"

namespace treeverify {

namespace {

template <class Unit>
cudaError_t launch(const KvCompactParams& params, cudaStream_t stream) {
  const int64_t units = params.row_bytes / static_cast<int64_t>(sizeof(Unit)) * params.layers;
  const int64_t blocks = (units + kCompactThreads - 1) / kCompactThreads * params.batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  smxx_kv_compact<Unit><<<static_cast<unsigned>(blocks), kCompactThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_kv_compact(const KvCompactParams& params, cudaStream_t stream) {
  if (params.unit >= 16) return launch<uint4>(params, stream);
  if (params.unit >= 4) return launch<uint32_t>(params, stream);
  return launch<uint8_t>(params, stream);
}

}  // namespace treeverify
