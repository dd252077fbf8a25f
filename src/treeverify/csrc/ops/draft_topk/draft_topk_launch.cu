// Launches of draft_topk: a block per tile of a row, then a block per row.
#include <cstdint>
#include <cuda_runtime.h>

#include "ops/draft_topk/draft_topk_kernel.cuh"
#include "ops/draft_topk/launch.h"

namespace treeverify {

cudaError_t launch_topk_tiles(const TopkTileParams& params, cudaStream_t stream) {
  const int64_t blocks = int64_t{params.batch} * params.depth * params.tiles;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (params.is_bf16) {
    smxx_draft_topk_tile<uint16_t><<<static_cast<unsigned>(blocks), kRankThreads, 0, stream>>>(params);
  } else {
    smxx_draft_topk_tile<uint32_t><<<static_cast<unsigned>(blocks), kRankThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t launch_topk_merge(const TopkMergeParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  smxx_draft_topk_merge<<<static_cast<unsigned>(params.rows), kRankThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace treeverify
