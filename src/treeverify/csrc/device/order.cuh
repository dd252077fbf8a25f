// Floats as unsigned integers that compare alike.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace treeverify {

// -0.0 and 0.0 give the same integer. Every NaN gives the largest one; no float gives 0.
__device__ __forceinline__ uint32_t ordered_bits(float x) {
  if (x != x) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered_bits(uint32_t bits) {
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

}  // namespace treeverify
