// A CUDA block on one CPU thread, others on others if need be. Every CUDA thread is a fiber; fibers change hands only where threads of a block meet
// (barriers, warp collectives), and who runs next is random, so a missing barrier or wait gives a wrong result.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

namespace emulator {

constexpr int kThreads = 256;  // of a block unless run_block is told otherwise
constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kArenaBytes = 240 * 1024;
constexpr int kMaxOperands = 8;

// Any bytes that nobody wrote: as bf16 or fp32 they are NaN, which no result survives.
constexpr int kPoison = 0xff;

struct Index {
  unsigned x;
};

// A warp that gathers for a collective: operands and results by lane.
struct Warp {
  const char* collective = nullptr;
  int arrived = 0;
  uint64_t generation = 0;
  uint64_t operands[32][kMaxOperands];
  uint64_t results[32][kMaxOperands];
};

// A cp.async that was issued. It happens when its group is waited for, as late as the hardware may do it.
struct Copy {
  uint32_t target;  // in the arena
  const void* source;
  bool wanted;
};
using CopyGroup = std::vector<Copy>;

extern thread_local int current;  // the thread that runs
extern thread_local unsigned block, grid;
extern thread_local uint8_t arena[kArenaBytes];                // dynamic shared memory
extern thread_local std::vector<CopyGroup> groups[kMaxThreads];  // by thread; the last group is still open

// Runs `body` as every thread of block `block_index` of `grid_size`, over poisoned dynamic shared memory. `threads` is a
// multiple of 32, up to kMaxThreads.
void run_block(std::function<void()> body, unsigned block_index, unsigned grid_size, int threads = kThreads);

// Runs all blocks at once, each on a CPU thread of its own, for kernels whose blocks wait for each other.
void run_together(const std::function<void()>& body, unsigned grid_size, int threads);

// Lets another thread run.
void yield();

// Ends the process: the kernel did what a GPU would not forgive.
[[noreturn]] void fail(const char* what);

// A barrier of the block that also says whether any thread came with a nonzero value.
int barrier_or(int value);

// Waits for the other lanes. True for the last lane to come, which must compute the results and call `release`.
bool gather(const char* collective, const uint64_t* operands, int count);
void release();
Warp& warp();

// A collective of a whole warp: `compute` turns the operands of all lanes into their results.
template <class Compute>
void collective(const char* name, const uint64_t* operands, int operand_count, uint64_t* results, int result_count,
                Compute compute) {
  if (gather(name, operands, operand_count)) {
    compute(warp());
    release();
  }
  for (int i = 0; i < result_count; ++i) results[i] = warp().results[current % 32][i];
}

// The same with one value per lane, `at` being what lane `lane` receives.
template <class At>
uint64_t exchange(const char* name, uint64_t value, uint64_t argument, At at) {
  const uint64_t operands[2] = {value, argument};
  uint64_t result;
  collective(name, operands, 2, &result, 1, [&](Warp& all) {
    for (int lane = 0; lane < 32; ++lane) all.results[lane][0] = at(all, lane);
  });
  return result;
}

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulator
