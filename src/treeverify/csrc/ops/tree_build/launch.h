// Host-side entry point of tree_build. Nothing here allocates, synchronises or names a stream itself.
#pragma once

#include <cuda_runtime.h>

#include "ops/tree_build/params.h"

namespace treeverify {

cudaError_t launch_tree_build(const TreeBuildParams& params, cudaStream_t stream);

}  // namespace treeverify
