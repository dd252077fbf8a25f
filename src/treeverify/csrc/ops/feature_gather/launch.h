// Host-side entry point of feature_gather. Nothing here allocates, synchronises or names a stream itself.
#pragma once

#include <cuda_runtime.h>

#include "ops/feature_gather/params.h"

namespace treeverify {

cudaError_t launch_feature_gather(const FeatureGatherParams& params, cudaStream_t stream);

}  // namespace treeverify
