// Host-side entry point of kv_compact. Nothing here allocates, synchronises or names a stream itself.
#pragma once

#include <cuda_runtime.h>

#include "ops/kv_compact/params.h"

namespace treeverify {

cudaError_t launch_kv_compact(const KvCompactParams& params, cudaStream_t stream);

}  // namespace treeverify
