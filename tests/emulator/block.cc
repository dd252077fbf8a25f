#include "block.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

#if !defined(__x86_64__)
#error "the emulator switches fibers in x86-64 assembly"
#endif

// Saves the callee-saved registers on this stack and its pointer in *save, then goes on where `load` was saved.
// (ucontext would do, but it makes a system call at every switch.)
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.globl emulator_switch
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

namespace emulator {

thread_local int current;
thread_local unsigned block, grid;
alignas(1024) thread_local uint8_t arena[kArenaBytes];
thread_local std::vector<CopyGroup> groups[kMaxThreads];

namespace {

constexpr int kStackBytes = 64 * 1024;
constexpr int kSavedRegisters = 6;
constexpr uint64_t kMaxYields = 100'000'000;  // without any thread coming to its end
constexpr int kHopEvery = 64;                 // yields between changes to another warp, on average

thread_local Warp warps[kMaxWarps];

thread_local struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
  int gathered = 0;
  int result = 0;
} barrier;

constexpr int kCaller = kMaxThreads;  // whoever called run_block
thread_local int block_threads;
thread_local void* stack_pointers[kMaxThreads + 1];
thread_local std::unique_ptr<uint8_t, decltype(&free)> stacks(nullptr, &free);
thread_local bool done[kMaxThreads];
thread_local int running;
thread_local uint64_t yields;
thread_local std::function<void()> body;
thread_local std::mt19937 random_order(1);

// The next thread: mostly a neighbour in the warp, as a warp must gather for nearly everything, now and then any other.
int pick() {
  const int origin = random_order() % kHopEvery == 0 ? static_cast<int>(random_order() % block_threads) : current;
  const int first_of_warp = origin / 32 * 32;
  for (int i = 1; i <= 32; ++i) {
    const int next = first_of_warp + (origin + i) % 32;
    if (!done[next]) return next;
  }
  for (int i = 1; i <= block_threads; ++i) {
    const int next = (origin + i) % block_threads;
    if (!done[next]) return next;
  }
  fail("no thread is left to run");
}

void switch_to(int next) {
  const int before = current;
  current = next;
  emulator_switch(&stack_pointers[before], stack_pointers[next]);
}

void enter() {
  body();
  done[current] = true;
  --running;
  yields = 0;
  if (running == 0) emulator_switch(&stack_pointers[current], stack_pointers[kCaller]);
  switch_to(pick());
  fail("a finished thread runs again");
}

// A stack that emulator_switch can return from, into `enter`.
void* fresh_stack(int thread) {
  if (stacks == nullptr) stacks.reset(static_cast<uint8_t*>(aligned_alloc(64, size_t{kMaxThreads} * kStackBytes)));
  auto** top = reinterpret_cast<void**>(stacks.get() + (thread + 1) * kStackBytes - 64);
  *--top = nullptr;  // where `enter` would return to; it also aligns the stack
  *--top = reinterpret_cast<void*>(enter);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  return top;
}

}  // namespace

void fail(const char* what) {
  fprintf(stderr, "emulator: block %u, thread %d: %s\n", block, current, what);
  abort();
}

void run_block(std::function<void()> thread_body, unsigned block_index, unsigned grid_size, int threads) {
  block_threads = threads;
  block = block_index;
  grid = grid_size;
  body = thread_body;
  running = threads;
  yields = 0;
  memset(arena, kPoison, sizeof(arena));
  for (int thread = 0; thread < threads; ++thread) {
    done[thread] = false;
    groups[thread].assign(1, {});
    stack_pointers[thread] = fresh_stack(thread);
  }
  current = 0;
  emulator_switch(&stack_pointers[kCaller], stack_pointers[0]);
}

void run_together(const std::function<void()>& thread_body, unsigned grid_size, int threads) {
  std::vector<std::thread> blocks;
  for (unsigned index = 0; index < grid_size; ++index) {
    blocks.emplace_back([=] { run_block(thread_body, index, grid_size, threads); });
  }
  for (std::thread& each : blocks) each.join();
}

void yield() {
  if (++yields > kMaxYields) fail("deadlock");
  const int next = pick();
  if (next != current) switch_to(next);
}

int barrier_or(int value) {
  const uint64_t generation = barrier.generation;
  barrier.gathered |= value;
  if (++barrier.arrived == block_threads) {
    barrier.result = barrier.gathered;
    barrier.arrived = 0;
    barrier.gathered = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) yield();
  return barrier.result;
}

Warp& warp() { return warps[current / 32]; }

bool gather(const char* collective, const uint64_t* operands, int count) {
  Warp& own = warp();
  if (own.arrived == 0) own.collective = collective;
  if (strcmp(own.collective, collective) != 0) {
    fprintf(stderr, "emulator: some lanes are in %s\n", own.collective);
    fail(collective);
  }
  for (int i = 0; i < count; ++i) own.operands[current % 32][i] = operands[i];
  const uint64_t generation = own.generation;
  if (++own.arrived == 32) return true;
  while (own.generation == generation) yield();
  return false;
}

void release() {
  Warp& own = warp();
  own.arrived = 0;
  ++own.generation;
}

}  // namespace emulator
