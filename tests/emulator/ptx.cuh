// Stands in for csrc/device/ptx.cuh: the same functions by their documented meaning, on the emulator's shared memory.
#pragma once

#include "cuda.h"

namespace treeverify {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - emulator::arena);
}

template <class T>
T opaque(T value) {
  return value;
}

inline int cold_thread() { return emulator::current; }

// From here until the wait the target holds nothing that may be read: it is poisoned.
inline void cp_async_16(uint32_t target, const void* source, bool wanted) {
  if (target % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0) emulator::fail("misaligned cp.async");
  if (target + 16 > emulator::kArenaBytes) emulator::fail("cp.async beyond shared memory");
  memset(emulator::arena + target, emulator::kPoison, 16);
  emulator::groups[emulator::current].back().push_back({target, source, wanted});
}

inline void cp_async_16(uint32_t target, const void* source) { cp_async_16(target, source, true); }

inline void cp_async_commit() { emulator::groups[emulator::current].push_back({}); }

template <int kPending>
void cp_async_wait() {
  auto& groups = emulator::groups[emulator::current];
  while (static_cast<int>(groups.size()) - 1 > kPending) {  // the last one is open
    for (const emulator::Copy& copy : groups.front()) {
      uint8_t* target = emulator::arena + copy.target;
      if (copy.wanted) {
        memcpy(target, copy.source, 16);
      } else {
        memset(target, 0, 16);
      }
    }
    groups.erase(groups.begin());
  }
}

// The eight rows of one matrix lie in different banks of 16 bytes, else the load would be slow: that is an error here.
inline void check_matrix_rows(const emulator::Warp& all, int matrix) {
  bool taken[8] = {};
  for (int row = 0; row < 8; ++row) {
    const uint64_t address = all.operands[matrix * 8 + row][0];
    if (address % 16 != 0 || address + 16 > emulator::kArenaBytes) emulator::fail("ldmatrix address");
    const int bank = static_cast<int>(address / 16 % 8);
    if (taken[bank]) emulator::fail("ldmatrix bank conflict");
    taken[bank] = true;
  }
}

inline uint64_t matrix_element(const emulator::Warp& all, int matrix, int row, int column) {
  uint16_t element;
  memcpy(&element, emulator::arena + all.operands[matrix * 8 + row][0] + column * 2, 2);
  return element;
}

template <bool kTransposed, int kMatrices>
void load_matrices(uint32_t* d, uint32_t address) {
  const uint64_t operand = address;
  uint64_t results[kMatrices];
  const char* name = kTransposed ? "ldmatrix.trans" : kMatrices == 4 ? "ldmatrix.x4" : "ldmatrix.x2";
  emulator::collective(name, &operand, 1, results, kMatrices, [](emulator::Warp& all) {
    for (int matrix = 0; matrix < kMatrices; ++matrix) {
      check_matrix_rows(all, matrix);
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        uint64_t pair[2];
        for (int i = 0; i < 2; ++i) {
          const int along = 2 * t + i;
          pair[i] = kTransposed ? matrix_element(all, matrix, along, g) : matrix_element(all, matrix, g, along);
        }
        all.results[lane][matrix] = pair[0] | pair[1] << 16;
      }
    }
  });
  for (int i = 0; i < kMatrices; ++i) d[i] = static_cast<uint32_t>(results[i]);
}

inline void ldmatrix_x4(uint32_t (&d)[4], uint32_t address) { load_matrices<false, 4>(d, address); }

inline void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address) { load_matrices<true, 4>(d, address); }

inline void ldmatrix_x2(uint32_t& d0, uint32_t& d1, uint32_t address) {
  uint32_t d[2];
  load_matrices<false, 2>(d, address);
  d0 = d[0];
  d1 = d[1];
}

// Two 32-bit registers in one operand, and back.
inline uint64_t join(uint32_t low, uint32_t high) { return low | static_cast<uint64_t>(high) << 32; }

inline uint64_t join(float low, float high) {
  return join(static_cast<uint32_t>(emulator::to_bits(low)), static_cast<uint32_t>(emulator::to_bits(high)));
}

inline float float_of(uint64_t pair, int half) {
  return emulator::from_bits<float>(pair >> (32 * half) & 0xffffffffu);
}

// A bf16 is the upper half of an fp32.
inline float bf16_of(uint64_t pair, int register_, int half) {
  const uint32_t word = static_cast<uint32_t>(pair >> (32 * register_));
  return emulator::from_bits<float>(half != 0 ? word & 0xffff0000u : word << 16);
}

// The operands of a lane: a in words 0 and 1, b in word 2, c in words 3 and 4; the results: c in words 0 and 1.
inline void multiply_fragments(emulator::Warp& all) {
  static float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const uint64_t* word = all.operands[lane];
    for (int i = 0; i < 2; ++i) {
      a[g][2 * t + i] = bf16_of(word[0], 0, i);
      a[g + 8][2 * t + i] = bf16_of(word[0], 1, i);
      a[g][2 * t + 8 + i] = bf16_of(word[1], 0, i);
      a[g + 8][2 * t + 8 + i] = bf16_of(word[1], 1, i);
      b[2 * t + i][g] = bf16_of(word[2], 0, i);
      b[2 * t + 8 + i][g] = bf16_of(word[2], 1, i);
      c[g][2 * t + i] = float_of(word[3], i);
      c[g + 8][2 * t + i] = float_of(word[4], i);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    all.results[lane][0] = join(c[g][2 * t], c[g][2 * t + 1]);
    all.results[lane][1] = join(c[g + 8][2 * t], c[g + 8][2 * t + 1]);
  }
}

inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint64_t operands[5] = {join(a[0], a[1]), join(a[2], a[3]), join(b0, b1), join(c[0], c[1]), join(c[2], c[3])};
  uint64_t results[2];
  emulator::collective("mma", operands, 5, results, 2, multiply_fragments);
  for (int i = 0; i < 4; ++i) c[i] = float_of(results[i / 2], i % 2);
}

inline float exp2_approx(float x) { return exp2f(x); }

inline void allow_dependent_launch() {}

inline void wait_for_previous_launch() {}

inline int warp_scan(int value) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, value, distance);
    if (emulator::current % 32 >= distance) value += below;
  }
  return value;
}

template <class T>
T warp_sum(T value) {
  for (int distance = 1; distance < 32; distance *= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

}  // namespace treeverify
