// Host-side entry points of draft_topk. Nothing here allocates, synchronises or names a stream itself.
#pragma once

#include <cuda_runtime.h>

#include "ops/draft_topk/params.h"

namespace treeverify {

cudaError_t launch_topk_tiles(const TopkTileParams& params, cudaStream_t stream);
cudaError_t launch_topk_merge(const TopkMergeParams& params, cudaStream_t stream);

}  // namespace treeverify
