// The place in a ring of slots. Pure arithmetic, tested on the CPU.
#pragma once

#include <cstdint>

namespace ikbo::hopper {

// Where a producer or a consumer stands in a ring: block b is in slot b % kSlots, and `phase` is
// the parity of the round b / kSlots.
template <int kSlots>
struct RingPosition {
  static_assert(kSlots >= 1);
  int slot = 0;
  uint32_t phase = 0;

  __host__ __device__ constexpr void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
  __host__ __device__ constexpr void advance(uint32_t blocks) {
    const uint32_t ahead = slot + blocks;
    slot = static_cast<int>(ahead % kSlots);
    phase ^= ahead / kSlots & 1;
  }
  // The place of the block `blocks` (at most kSlots) before.
  __host__ __device__ constexpr RingPosition before(int blocks) const {
    return {slot_before(blocks), phase ^ static_cast<uint32_t>(slot < blocks)};
  }
  // The slot of the block `blocks` (at most kSlots) before.
  __host__ __device__ constexpr int slot_before(int blocks) const {
    const int before = slot - blocks;
    return before < 0 ? before + kSlots : before;
  }
};

}  // namespace ikbo::hopper
