// CUDA's keywords, built-in variables and the intrinsics that the kernels use, for a host compiler.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <thread>

#include "block.h"

// Static shared memory: a CPU thread runs one block at a time.
#undef __shared__
#define __shared__ static thread_local
#undef __grid_constant__
#define __grid_constant__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __forceinline__
#define __forceinline__ inline
#ifndef __global__
#define __global__
#endif
#undef __align__
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (emulator::Index{static_cast<unsigned>(emulator::current)})
#define blockIdx (emulator::Index{emulator::block})
#define gridDim (emulator::Index{emulator::grid})

// glibc and the compiler have names of their own for these.
#define __trap emulated_trap
#define __ffs emulated_ffs

inline void emulated_trap() { emulator::fail("trap"); }
inline int emulated_ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline int __syncthreads_or(int value) { return emulator::barrier_or(value); }
inline void __syncthreads() { emulator::barrier_or(0); }

inline void __syncwarp() {
  emulator::collective("syncwarp", nullptr, 0, nullptr, 0, [](emulator::Warp&) {});
}

template <class T>
T __shfl_sync(unsigned, T value, int source) {
  const auto at = [](const emulator::Warp& all, int lane) { return all.operands[all.operands[lane][1] & 31][0]; };
  return emulator::from_bits<T>(emulator::exchange("shfl", emulator::to_bits(value), source, at));
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const auto at = [](const emulator::Warp& all, int lane) { return all.operands[lane ^ all.operands[lane][1]][0]; };
  return emulator::from_bits<T>(emulator::exchange("shfl_xor", emulator::to_bits(value), mask, at));
}

template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const auto at = [](const emulator::Warp& all, int lane) {
    const int source = lane - static_cast<int>(all.operands[lane][1]);
    return all.operands[source < 0 ? lane : source][0];
  };
  return emulator::from_bits<T>(emulator::exchange("shfl_up", emulator::to_bits(value), distance, at));
}

inline uint32_t __ballot_sync(unsigned, int predicate) {
  const auto at = [](const emulator::Warp& all, int) {
    uint64_t votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= all.operands[lane][0] << lane;
    return votes;
  };
  return static_cast<uint32_t>(emulator::exchange("ballot", predicate != 0, 0, at));
}

inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const auto at = [](const emulator::Warp& all, int) {
    uint64_t largest = 0;
    for (int lane = 0; lane < 32; ++lane) largest = std::max(largest, all.operands[lane][0]);
    return largest;
  };
  return static_cast<unsigned>(emulator::exchange("reduce_max", value, 0, at));
}

inline int __reduce_max_sync(unsigned mask, int value) {
  constexpr unsigned kSign = 0x80000000u;  // the unsigned order, moved
  return static_cast<int>(__reduce_max_sync(mask, static_cast<unsigned>(value) ^ kSign) ^ kSign);
}

inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  const auto at = [](const emulator::Warp& all, int) {
    uint64_t sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += all.operands[lane][0];
    return sum;
  };
  return static_cast<unsigned>(emulator::exchange("reduce_add", value, 0, at));
}

inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  const auto at = [](const emulator::Warp& all, int) {
    uint64_t smallest = all.operands[0][0];
    for (int lane = 1; lane < 32; ++lane) smallest = std::min(smallest, all.operands[lane][0]);
    return smallest;
  };
  return static_cast<unsigned>(emulator::exchange("reduce_min", value, 0, at));
}

inline uint32_t __float_as_uint(float x) { return static_cast<uint32_t>(emulator::to_bits(x)); }
inline float __uint_as_float(uint32_t bits) { return emulator::from_bits<float>(bits); }
inline float __int_as_float(int bits) { return emulator::from_bits<float>(static_cast<uint32_t>(bits)); }
inline int __float_as_int(float x) { return static_cast<int>(emulator::to_bits(x)); }

inline int atomicMin(int* target, int value) {
  const int before = *target;
  if (value < before) *target = value;
  return before;
}

// Blocks that run together share global memory.
template <class T>
T atomicAdd(T* target, T value) {
  return std::atomic_ref<T>(*target).fetch_add(value);
}

inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) { std::this_thread::yield(); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline uint64_t __float2ull_rn(float x) { return static_cast<uint64_t>(std::rint(static_cast<double>(x))); }
inline uint64_t __double2ull_rz(double x) { return static_cast<uint64_t>(x); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

template <class T>
T __ldcg(const T* source) {
  return *source;
}

template <class A, class B>
auto min(A a, B b) {
  using Common = decltype(a + b);
  return a < b ? static_cast<Common>(a) : static_cast<Common>(b);
}

template <class A, class B>
auto max(A a, B b) {
  using Common = decltype(a + b);
  return a > b ? static_cast<Common>(a) : static_cast<Common>(b);
}
