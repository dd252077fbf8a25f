// The portable kernel without a binding, for scripts/gpu/bench_quick.py: plain C, every depth, options by value.
#include "ops/tree_attention/launch.h"
#include "ops/tree_attention/portable_launch.h"

extern "C" {

int quick_launch(const treeverify::TreeAttentionParams* params, int depth, int tile_rows, int early_merge,
                 int allow_parts, void* stream) {
  treeverify::PortableOptions options;
  options.depth = static_cast<treeverify::PortableDepth>(depth);
  options.tile_rows = tile_rows;
  options.early_merge = early_merge != 0;
  options.allow_parts = allow_parts != 0;
  return launch_portable_with(*params, options, static_cast<cudaStream_t>(stream));
}

int quick_params_bytes() { return sizeof(treeverify::TreeAttentionParams); }

}  // extern "C"
