// Host-side entry point of tree_mask. Nothing here allocates, synchronises or names a stream itself.
#pragma once

#include <cuda_runtime.h>

#include "ops/tree_mask/params.h"

namespace treeverify {

cudaError_t launch_tree_mask(const TreeMaskParams& params, cudaStream_t stream);

}  // namespace treeverify
