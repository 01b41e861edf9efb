// Warp-group matrix products m64nNk16 of 16-bit operands with fp32 sums.
#pragma once

#include <cstdint>

#include "hopper/mbarrier.cuh"
#include "hopper/swizzle.cuh"

namespace ikbo::hopper {

// How an operand tile stands in shared memory, always with the 128-byte swizzle.
enum class Major {
  kK,   // rows of 64 elements along K: tile[m or n][k], as weights and row-major activations are
  kMn,  // rows of 64 elements along M or N: tile[k][m or n]; wider tiles are blocks of 64 side by
        // side
};

// The 64-bit matrix descriptor of an operand: address and strides in units of 16 bytes.
//
// K-major: rows are 128 bytes apart, groups of eight rows 1024 (the stride offset; the leading
// offset is unused). MN-major: one k row holds 64 elements; groups of eight k rows are 1024 bytes
// apart (the stride offset), the next 64 elements of M or N `block_bytes` (the leading offset).
template <Major kMajor>
__host__ __device__ constexpr uint64_t descriptor_bits(uint32_t address, uint32_t block_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kStride = uint64_t{kSwizzleAtomBytes >> 4} << 32;
  const uint64_t leading = kMajor == Major::kK ? 1 : block_bytes >> 4;
  return kSwizzle128 | kStride | leading << 16 | uint64_t{(address & 0x3ffff) >> 4};
}
template <Major kMajor>
__device__ inline uint64_t descriptor(const void* tile, uint32_t block_bytes = 0) {
  return descriptor_bits<kMajor>(shared_address(tile), block_bytes);
}

// What to add to a descriptor to move it on by one k16 step: 16 elements of a row, or 16 rows.
template <Major kMajor>
inline constexpr uint64_t kDescriptorStep = (kMajor == Major::kK ? 32 : 16 * kSwizzleRowBytes) >> 4;

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
