// How wgmma finds the elements of an operand in shared memory. Pure arithmetic, tested on the CPU.
#pragma once

#include <cstdint>

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

// What to add to a descriptor to move it on by one k16 step: 16 elements of a row, or 16 rows.
template <Major kMajor>
inline constexpr uint32_t kDescriptorStep = (kMajor == Major::kK ? 32 : 16 * kSwizzleRowBytes) >> 4;

// The descriptor `units` of 16 bytes further on. Addresses never carry into the upper half, whose
// arithmetic would cost as much again.
__host__ __device__ constexpr uint64_t moved(uint64_t descriptor, uint32_t units) {
  constexpr uint64_t kUpper = uint64_t{0xffffffff} << 32;
  return (descriptor & kUpper) | (static_cast<uint32_t>(descriptor) + units);
}

}  // namespace ikbo::hopper
