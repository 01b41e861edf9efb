// Tiles by ticket: whichever CTA is free takes the next one. Tickets are drawn in order, so that a
// tile may wait for results of tiles with lower numbers: CTAs that run hold those already.
#pragma once

#include <cstdint>

#include "hopper/mbarrier.cuh"
#include "hopper/ring_position.cuh"

namespace ikbo::hopper {

// Hands the tickets of one thread, which may draw up to kSlots ahead, to `kReaderWarps` warps of
// its CTA. `counter` is in global memory, cleared on the stream before each launch. All stop at the
// first ticket past the last tile, which is handed on too.
template <int kSlots, int kReaderWarps>
struct Tickets {
  static_assert(kReaderWarps >= 1 && kReaderWarps <= 32);
  using Position = RingPosition<kSlots>;

  Barrier full[kSlots];
  Barrier empty[kSlots];
  uint32_t tickets[kSlots];

  // By one thread. Then fence_barrier_init() and __syncthreads().
  __device__ void init() {
    for (int slot = 0; slot < kSlots; ++slot) {
      hopper::init(full[slot], 1);
      hopper::init(empty[slot], kReaderWarps);
    }
  }

  // The drawing thread.
  __device__ uint32_t draw(const Position& position, uint32_t* counter) {
    const uint32_t ticket = atomicAdd(counter, 1u);
    wait(empty[position.slot], position.phase ^ 1);
    tickets[position.slot] = ticket;
    arrive(full[position.slot]);
    return ticket;
  }

  // All lanes of each reading warp, once for every ticket drawn.
  __device__ uint32_t read(const Position& position) {
    wait(full[position.slot], position.phase);
    const uint32_t ticket = tickets[position.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty[position.slot]);
    return ticket;
  }
};

}  // namespace ikbo::hopper
