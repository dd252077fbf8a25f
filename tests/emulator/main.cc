// Runs every case through the portable kernel and its merge; prints a line each that ends in "ok" or "FAIL".
//
// Compiled once per TILE_ROWS. The kernels' headers come from a copy of csrc in which device/ptx.cuh is this folder's.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "cuda.h"

#include "ops/tree_attention/merge_kernel.cuh"
#include "problem.h"

using namespace treeverify;

namespace {

constexpr double kOutTolerance = 2.6e-3;  // weights and output are bf16
constexpr double kLseTolerance = 1e-2;
constexpr unsigned kMergeCtas = 5;
constexpr unsigned kSeed = 7;

// The workspace of a launch as portable_launch.cu lays it out, full of NaN.
class Workspace {
 public:
  Workspace(const Case& shape, PortableArgs& args) {
    const int batch = args.p.batch;
    const int longest = *std::max_element(shape.prefixes.begin(), shape.prefixes.end());
    const int tiles = (longest + shape.nodes + kTileKeys - 1) / kTileKeys;
    const bool fixed = shape.granule != 0;
    const int splits = fixed ? (tiles + shape.granule - 1) / shape.granule : 0;
    args.slots = fixed ? batch * args.row_tiles * splits : 2 * shape.ctas;
    args.entries = fixed ? batch * args.row_tiles : shape.ctas;
    const size_t partial_bytes = static_cast<size_t>(args.slots) * TILE_ROWS * kLatent * sizeof(float);
    args.merge = allocate<MergeEntry>(args.entries * sizeof(MergeEntry), fixed ? 0 : kStaleEntry);
    args.stats = allocate<float2>(args.slots * TILE_ROWS * sizeof(float2), emulator::kPoison);
    args.partials = allocate<float>(partial_bytes, emulator::kPoison);
  }

 private:
  // In balanced mode every CTA writes its entry: what an earlier launch left must not matter.
  static constexpr int kStaleEntry = 0x77;

  template <class T>
  T* allocate(size_t bytes, int fill) {
    const size_t rounded = (bytes + 255) / 256 * 256;
    blocks_.emplace_back(aligned_alloc(256, rounded), &free);
    memset(blocks_.back().get(), fill, rounded);
    return static_cast<T*>(blocks_.back().get());
  }

  std::vector<std::unique_ptr<void, decltype(&free)>> blocks_;
};

template <class Config>
void launch(const Case& shape, const PortableArgs& args) {
  for (int cta = 0; cta < shape.ctas; ++cta) {
    emulator::run_block([&] { smxx_bf16_tree_attention_portable<Config>(args); }, cta, shape.ctas);
  }
  for (unsigned cta = 0; cta < kMergeCtas; ++cta) {
    emulator::run_block([&] { smxx_bf16_tree_attention_merge(args, TILE_ROWS); }, cta, kMergeCtas);
  }
}

bool passes(const Case& shape) {
  Problem problem(shape, kSeed);
  PortableArgs args{};
  args.p = problem.params();
  const int rows = shape.nodes * shape.heads;
  args.row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  args.useful_rows = (rows + args.row_tiles - 1) / args.row_tiles;
  args.granule = shape.granule;
  args.allow_parts = shape.allow_parts;
  const Workspace workspace(shape, args);
  switch (shape.depth) {
    case Depth::kSmall:
      launch<PortableConfig<TILE_ROWS, 2>>(shape, args);
      break;
    case Depth::kDeep:
      launch<PortableConfig<TILE_ROWS, 3>>(shape, args);
      break;
  }
  const Errors errors = problem.errors();
  const bool ok = errors.out < kOutTolerance && errors.lse < kLseTolerance;
  printf("%s: out %.2e lse %.1e %s\n", shape.name, errors.out, errors.lse, ok ? "ok" : "FAIL");
  fflush(stdout);
  return ok;
}

}  // namespace

int main() {
  std::vector<Case> cases = mask_cases();
  for (const Case& shape : schedule_cases()) cases.push_back(shape);
  if (TILE_ROWS != 32) {  // they are long, and two other row tiles will do
    for (const Case& shape : many_cta_cases()) cases.push_back(shape);
  }
  int failures = 0;
  for (const Case& shape : cases) failures += passes(shape) ? 0 : 1;
  return failures == 0 ? 0 : 1;
}
