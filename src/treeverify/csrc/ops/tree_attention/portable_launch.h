// The portable kernel's choices, for those who time or test them; launch.h is what everyone else includes.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "ops/tree_attention/params.h"

namespace treeverify {

constexpr int32_t kSmallSharedBytes = 101376;  // what one CTA may have on sm_86, sm_89, sm_120 and sm_121

// What is not kDefault exists only in a library built with TREEVERIFY_ALL_DEPTHS.
enum class PortableDepth : int32_t {
  kDefault = 0,  // the deepest that TREEVERIFY_SHARED_LIMIT allows
  kSmall = 1,    // two stages: never over kSmallSharedBytes
  kDeep = 2,     // three stages
};

struct PortableOptions {
  PortableDepth depth = PortableDepth::kDefault;
  int32_t tile_rows = 0;    // 0 = by cost
  bool allow_parts = true;  // items may be cut into a whole number of equal parts
  bool early_merge = true;  // let the merge kernel's launch overlap the first kernel (sm_90 and later)
};

cudaError_t launch_portable_with(const TreeAttentionParams& params, const PortableOptions& options,
                                 cudaStream_t stream);

}  // namespace treeverify
