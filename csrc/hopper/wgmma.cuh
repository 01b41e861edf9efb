// Warp-group matrix products m64nNk16 of 16-bit operands with fp32 sums.
#pragma once

#include <cstdint>

#include "hopper/descriptor.cuh"
#include "hopper/mbarrier.cuh"

namespace ikbo::hopper {

// The descriptor of an operand tile in shared memory.
template <Major kMajor>
__device__ inline uint64_t descriptor(const void* tile, uint32_t block_bytes = 0) {
  return descriptor_bits<kMajor>(shared_address(tile), block_bytes);
}

// Before the first product that reads accumulators or A registers written by ordinary instructions.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kGroups committed groups are still running.
template <int kGroups>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Keeps the compiler from moving accesses of the accumulators across a wait.
template <int kCount>
__device__ inline void fence_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// D[64 x kN] = A B (+ D): Wgmma<T, kN, A's major, B's major>::multiply(d, a, b, add).
//   d    kN / 2 floats a thread: lane l of warp w holds rows 16w + l/4 (+ 8) and columns
//        8j + 2(l % 4) (+ 1): d[4j], d[4j+1] of the upper row, d[4j+2], d[4j+3] of the lower
//   a, b descriptors; `add` false overwrites D
// multiply_registers takes A from registers instead, K-major only: two elements a register, of row
//   16w + l/4 (a[0], a[2]) and 8 below (a[1], a[3]), columns 2(l % 4) (+ 1), in a[2], a[3] 8
//   further
// A call between commits, a product under a condition or fewer registers than sums and fragments
// need makes ptxas serialise all of them, which fails the build.
template <class T, int kN, Major kMajorA, Major kMajorB>
struct Wgmma;

}  // namespace ikbo::hopper

#include "generated/wgmma_instructions.cuh"
