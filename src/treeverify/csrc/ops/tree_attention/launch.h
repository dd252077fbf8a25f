// Host-side entry points of the tree-attention kernels. Nothing here allocates, synchronises or names a stream itself.
//
// Each specialisation (naive, portable, portable-99k) is compiled for one target into a library of its own, so nothing
// clashes. Device and host code of a library see TREEVERIFY_SHARED_LIMIT, the shared memory in bytes that one block may
// have: the target's opt-in limit (101376 on sm_86, 89, 120 and 121, 166912 on sm_80, 232448 on sm_90a and 100), and
// never more than 101376 for portable-99k, which differs from portable in nothing else.
#pragma once

#include <cuda_runtime.h>

#include "ops/tree_attention/params.h"

namespace treeverify {

// naive: one CTA per (request, head, node). `max_prefix` bounds what its shared memory must hold.
cudaError_t launch_naive(const TreeAttentionParams& params, int64_t max_prefix, cudaStream_t stream);

// The longest prefix whose scores fit beside `nodes` draft scores; negative if not even an empty one does.
int64_t naive_max_prefix(int32_t nodes);

// portable: split-KV flash kernel, then a merge of the partials.
cudaError_t launch_portable(const TreeAttentionParams& params, cudaStream_t stream);

// Bytes of workspace that launch_portable needs for any KV lengths, from sizes that the host knows.
int64_t portable_workspace_bytes(int32_t batch, int32_t nodes, int32_t heads, int32_t multiprocessors,
                                 int32_t fixed_split, int64_t max_prefix);

// Dynamic shared memory of the largest block that any launch of this library asks for (jit/resources.py adds the
// static part and compares with the limit).
int64_t naive_shared_bytes();
int64_t portable_shared_bytes();

}  // namespace treeverify
