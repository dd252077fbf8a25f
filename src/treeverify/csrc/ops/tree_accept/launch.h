// Host-side entry points of tree_accept. Nothing here allocates, synchronises or names a stream itself.
#pragma once

#include <cuda_runtime.h>

#include "ops/tree_accept/params.h"

namespace treeverify {

cudaError_t launch_tree_accept(const TreeAcceptParams& params, cudaStream_t stream);
cudaError_t launch_tree_accept_sampled(const TreeAcceptSampledParams& params, cudaStream_t stream);

}  // namespace treeverify
