// The 128-byte swizzle that TMA and wgmma share: within each 1024-byte atom of eight 128-byte rows,
// the 16-byte chunk index is XORed with the row index, so that a column of chunks meets every bank.
#pragma once

#include <cstdint>

namespace ikbo::hopper {

inline constexpr int kSwizzleRowBytes = 128;
inline constexpr int kSwizzleAtomBytes = 1024;  // alignment of every swizzled tile

// The byte offset of (row, byte) in a tile of 128-byte rows.
__host__ __device__ constexpr uint32_t swizzle_128(uint32_t row, uint32_t byte) {
  return row * kSwizzleRowBytes + (byte ^ ((row % 8) * 16));
}

}  // namespace ikbo::hopper
