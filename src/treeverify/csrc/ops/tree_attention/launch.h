// Host-side entry points of the tree-attention kernels. Nothing here allocates, synchronises or names a stream itself.
#pragma once

#include <cuda_runtime.h>

#include "ops/tree_attention/params.h"

namespace treeverify {

// naive: one CTA per (request, head, node). `max_prefix` bounds what its shared memory must hold.
cudaError_t launch_naive(const TreeAttentionParams& params, int64_t max_prefix, cudaStream_t stream);

// portable: split-KV flash kernel, then a merge of the partials.
cudaError_t launch_portable(const TreeAttentionParams& params, cudaStream_t stream);

// Bytes of workspace that launch_portable needs for any KV lengths, from sizes that the host knows.
int64_t portable_workspace_bytes(int32_t batch, int32_t nodes, int32_t heads, int32_t multiprocessors,
                                 int32_t fixed_split, int64_t max_prefix);

}  // namespace treeverify
