// The rate that mma.sync reaches when nothing else is in the way: bf16 m16n8k16 with fp32 accumulation, all operands in
// registers, no memory traffic. It is the ceiling of every kernel that is built on mma.sync; on Hopper it lies well
// under the rate of wgmma.
//
// Each warp owns kTiles independent accumulators, so that the tensor cores never wait for a result. Operands are random:
// zeros draw less power and would run faster than data does.
#include <cstdint>
#include <cuda_runtime.h>

namespace treeverify::bench {

constexpr int kWarps = 8;
constexpr int kTiles = 8;
constexpr int kFlopsPerMma = 2 * 16 * 8 * 16;

__device__ inline std::uint32_t random_bf16_pair(std::uint32_t seed) {
  seed ^= seed >> 16;
  seed *= 0x7feb352du;
  seed ^= seed >> 15;
  seed *= 0x846ca68bu;
  seed ^= seed >> 16;
  return (seed & 0x807f807fu) | 0x3f003f00u;  // both halves: random sign and mantissa, magnitude in [0.5, 1)
}

__global__ void __launch_bounds__(kWarps * 32) mma_ceiling_kernel(float* sink, int iterations) {
  const std::uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  std::uint32_t a[4];
  std::uint32_t b[kTiles][2];
  float c[kTiles][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = random_bf16_pair(thread * 64 + i);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    b[t][0] = random_bf16_pair(thread * 64 + 4 + 2 * t);
    b[t][1] = random_bf16_pair(thread * 64 + 5 + 2 * t);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[t][i] = 0.0f;
  }
#pragma unroll 4
  for (int step = 0; step < iterations; ++step) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(c[t][0]), "+f"(c[t][1]), "+f"(c[t][2]), "+f"(c[t][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[t][0]), "r"(b[t][1]));
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) sum += c[t][0] + c[t][1] + c[t][2] + c[t][3];
  sink[thread] = sum;  // one store per thread keeps the loop alive
}

}  // namespace treeverify::bench

extern "C" {

// Elements that `sink` needs for `blocks` blocks.
std::int64_t treeverify_mma_ceiling_sink(int blocks) { return std::int64_t{blocks} * treeverify::bench::kWarps * 32; }

// Floating-point operations of one launch.
std::int64_t treeverify_mma_ceiling_flops(int blocks, int iterations) {
  using namespace treeverify::bench;
  return std::int64_t{blocks} * kWarps * kTiles * kFlopsPerMma * iterations;
}

// Launch on `stream`; returns the launch's cudaError_t.
int treeverify_mma_ceiling(float* sink, int blocks, int iterations, void* stream) {
  using namespace treeverify::bench;
  mma_ceiling_kernel<<<blocks, kWarps * 32, 0, static_cast<cudaStream_t>(stream)>>>(sink, iterations);
  return static_cast<int>(cudaGetLastError());
}

}  // extern "C"
