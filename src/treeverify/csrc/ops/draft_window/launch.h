// Host-side entry point of draft_window. Nothing here allocates, synchronises or names a stream itself.
#pragma once

#include <cuda_runtime.h>

#include "ops/draft_window/params.h"

namespace treeverify {

cudaError_t launch_draft_window(const DraftWindowParams& params, cudaStream_t stream);

}  // namespace treeverify
