// Host side of the portable kernel: chooses row tile and schedule, lays out the workspace, launches kernel and merge.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ops/tree_attention/launch.h"
#include "ops/tree_attention/merge_kernel.cuh"
#include "ops/tree_attention/portable_kernel.cuh"
#include "ops/tree_attention/portable_launch.h"

namespace treeverify {
namespace {

constexpr int kTileRowChoices[] = {16, 32, 40};
constexpr int kBriefRows = 16;
constexpr int kBriefUnits = 2;  // per CTA: a call that has no more units at the usual row tile spreads wider at kBriefRows

int div_up(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Shared-memory bytes per key that a row tile costs: the KV row is written once and read twice (3328), each row adds its
// scores, weights and their re-reads (50). The least total over the row tiles of a request wins.
int choose_tile_rows(int rows) {
  int best = 0;
  int64_t best_cost = 0;
  for (const int tile : kTileRowChoices) {
    const int64_t cost = static_cast<int64_t>(div_up(rows, tile)) * (3328 + 50 * tile);
    if (best == 0 || cost < best_cost) {
      best = tile;
      best_cost = cost;
    }
  }
  return best;
}

// The row tile of a call. The host does not know the lengths, only a bound, so a loose bound costs a short call time.
int tile_rows_of(const TreeAttentionParams& params) {
  const int rows = params.nodes * params.heads;
  const int usual = choose_tile_rows(rows);
  if (params.fixed_split != 0 || usual <= kBriefRows || params.max_prefix <= 0) return usual;
  const int64_t tiles = (params.max_prefix + params.nodes + kTileKeys - 1) / kTileKeys;
  const int64_t items = static_cast<int64_t>(params.batch) * div_up(rows, usual);
  const int64_t most = kBriefUnits * static_cast<int64_t>(params.multiprocessors);
  return tiles <= most && items * tiles <= most ? kBriefRows : usual;
}

struct Layout {
  int tile_rows, row_tiles, granule, entries;
  int64_t slots, merge_offset, stats_offset, partials_offset, bytes;
};

int64_t align_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

Layout lay_out(int batch, int rows, int nodes, int multiprocessors, int fixed_split, int64_t max_prefix, int tile_rows) {
  Layout layout{};
  layout.tile_rows = tile_rows;
  layout.row_tiles = div_up(rows, tile_rows);
  layout.granule = fixed_split == 0 ? 0 : std::max(1, div_up(fixed_split, kTileKeys));
  if (layout.granule == 0) {
    layout.slots = 2 * static_cast<int64_t>(multiprocessors);
    layout.entries = multiprocessors;
  } else {
    layout.entries = batch * layout.row_tiles;
    const int splits = div_up(div_up(max_prefix + nodes, kTileKeys), layout.granule);
    layout.slots = static_cast<int64_t>(layout.entries) * splits;
  }
  layout.merge_offset = 0;
  layout.stats_offset = align_up(layout.entries * static_cast<int64_t>(sizeof(MergeEntry)));
  layout.partials_offset = layout.stats_offset + align_up(layout.slots * tile_rows * static_cast<int64_t>(sizeof(float2)));
  layout.bytes = layout.partials_offset + layout.slots * tile_rows * kLatent * static_cast<int64_t>(sizeof(float));
  return layout;
}

// The slots that fit into a workspace of the given size, for layouts whose bound only the caller knows.
Layout fit_slots(Layout layout, int64_t bytes) {
  const int64_t per_slot = layout.tile_rows * static_cast<int64_t>(sizeof(float2) + kLatent * sizeof(float));
  const int64_t room = bytes - layout.stats_offset - 256;
  layout.slots = std::max<int64_t>(0, room / per_slot);
  layout.partials_offset =
      layout.stats_offset + align_up(layout.slots * layout.tile_rows * static_cast<int64_t>(sizeof(float2)));
  return layout;
}

template <class Config>
cudaError_t launch_config(const PortableArgs& args, int ctas, cudaStream_t stream) {
  const auto kernel = smxx_bf16_tree_attention_portable<Config>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<ctas, kThreads, Config::kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

// The configurations of one row tile. A library holds the best one that its limit allows; one that is built to compare
// them holds both.
template <int kTileRows>
struct Choice {
  using Small = PortableConfig<kTileRows, 2>;
  using Deep = PortableConfig<kTileRows, 3>;
  using Default = std::conditional_t<(Deep::kSharedBytes <= TREEVERIFY_SHARED_LIMIT), Deep, Small>;
  static_assert(Small::kSharedBytes <= kSmallSharedBytes && Default::kSharedBytes <= TREEVERIFY_SHARED_LIMIT);
};

template <int kTileRows>
cudaError_t launch_rows(const PortableArgs& args, PortableDepth depth, int ctas, cudaStream_t stream) {
  using Choice = Choice<kTileRows>;
#ifdef TREEVERIFY_ALL_DEPTHS
  if (depth == PortableDepth::kSmall) return launch_config<typename Choice::Small>(args, ctas, stream);
  if (depth == PortableDepth::kDeep) return launch_config<typename Choice::Deep>(args, ctas, stream);
#endif
  if (depth != PortableDepth::kDefault) return cudaErrorInvalidConfiguration;
  return launch_config<typename Choice::Default>(args, ctas, stream);
}

cudaError_t launch_merge(const PortableArgs& args, int tile_rows, bool early, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kMergeBlocksPerMultiprocessor * args.p.multiprocessors);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, smxx_bf16_tree_attention_merge, args, tile_rows);
}

}  // namespace

cudaError_t launch_portable_with(const TreeAttentionParams& params, const PortableOptions& options,
                                 cudaStream_t stream) {
  if (params.batch == 0) return cudaSuccess;
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;

  const int rows = params.nodes * params.heads;
  const int tile_rows = options.tile_rows > 0 ? options.tile_rows : tile_rows_of(params);
  Layout layout = lay_out(params.batch, rows, params.nodes, params.multiprocessors, params.fixed_split, 0, tile_rows);
  if (layout.granule != 0) layout = fit_slots(layout, params.workspace_bytes);
  if (layout.granule == 0 && layout.bytes > params.workspace_bytes) return cudaErrorInvalidValue;

  auto* workspace = static_cast<uint8_t*>(params.workspace);
  PortableArgs args{};
  args.p = params;
  args.row_tiles = layout.row_tiles;
  args.useful_rows = div_up(rows, layout.row_tiles);
  args.granule = layout.granule;
  args.allow_parts = options.allow_parts;
  args.slots = static_cast<int32_t>(std::min<int64_t>(layout.slots, INT32_MAX));
  args.entries = layout.entries;
  args.merge = reinterpret_cast<MergeEntry*>(workspace + layout.merge_offset);
  args.stats = reinterpret_cast<float2*>(workspace + layout.stats_offset);
  args.partials = reinterpret_cast<float*>(workspace + layout.partials_offset);

  const int ctas = params.multiprocessors;
  switch (tile_rows) {
    case 16: error = launch_rows<16>(args, options.depth, ctas, stream); break;
    case 32: error = launch_rows<32>(args, options.depth, ctas, stream); break;
    case 40: error = launch_rows<40>(args, options.depth, ctas, stream); break;
    default: return cudaErrorInvalidValue;
  }
  if (error != cudaSuccess) return error;
  return launch_merge(args, tile_rows, options.early_merge && major >= 9, stream);
}

cudaError_t launch_portable(const TreeAttentionParams& params, cudaStream_t stream) {
  return launch_portable_with(params, PortableOptions{}, stream);
}

int64_t portable_shared_bytes() {
  return std::max({Choice<16>::Default::kSharedBytes, Choice<32>::Default::kSharedBytes,
                   Choice<40>::Default::kSharedBytes});
}

int64_t portable_workspace_bytes(int32_t batch, int32_t nodes, int32_t heads, int32_t multiprocessors,
                                 int32_t fixed_split, int64_t max_prefix) {
  const int rows = nodes * heads;
  return lay_out(batch, rows, nodes, multiprocessors, fixed_split, max_prefix, choose_tile_rows(rows)).bytes + 256;
}

}  // namespace treeverify
