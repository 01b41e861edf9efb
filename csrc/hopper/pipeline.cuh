// A ring of slots in shared memory that a producer fills by TMA and consumers empty.
#pragma once

#include <cstdint>

#include "hopper/mbarrier.cuh"
#include "hopper/ring_position.cuh"
#include "hopper/warp_group.cuh"

namespace ikbo::hopper {

// The barriers of a ring, in shared memory. `kConsumerGroups` counts the warp groups that read each
// block (where two groups take turns, a block is read by one). With `kClusterCtas` > 1 the producer
// of a CTA multicasts into the rings of all, so it waits until the consumers of all have released
// the slot.
//
// A barrier knows only the parity of its rounds: whoever waits for block b must be sure that block
// b - kSlots has arrived. A consumer that reads every block is. One that skips its partner's blocks
// first waits, at a named barrier, until the partner has waited for the last of them.
template <int kSlots, int kConsumerGroups, int kClusterCtas = 1>
struct Pipeline {
  static_assert(kConsumerGroups >= 1 && kConsumerGroups <= 7);
  static_assert(kClusterCtas == 1 || kClusterCtas == 2 || kClusterCtas == 4 || kClusterCtas == 8);
  static constexpr uint32_t kFullArrivals = 1;  // the producer's; the bytes follow
  static constexpr uint32_t kEmptyArrivals = kConsumerGroups * kClusterCtas;
  using Position = RingPosition<kSlots>;

  Barrier full[kSlots];
  Barrier empty[kSlots];

  // By one thread. Then fence_barrier_init() and __syncthreads() or cluster_sync().
  __device__ void init() {
    for (int slot = 0; slot < kSlots; ++slot) {
      hopper::init(full[slot], kFullArrivals);
      hopper::init(empty[slot], kEmptyArrivals);
    }
  }

  // Producer, one thread: waits for the slot (at once in the first round) and announces the bytes
  // that will arrive in this CTA's slot. The loads that follow complete on full[position.slot].
  __device__ Barrier& produce(const Position& position, uint32_t bytes) {
    wait(empty[position.slot], position.phase ^ 1);
    arrive_expect_bytes(full[position.slot], bytes);
    return full[position.slot];
  }

  // Consumer: every thread that reads the slot.
  __device__ void wait_full(const Position& position) { wait(full[position.slot], position.phase); }

  // Consumer, all threads of a warp group, after wgmma_wait() has ended their products on the slot.
  // A group that reads it by ordinary loads or ldmatrix meets at a barrier first: one thread
  // arrives for all.
  __device__ void release(const Position& position) {
    const uint32_t thread = threadIdx.x % kWarpGroupThreads;
    if constexpr (kClusterCtas == 1) {
      if (thread == 0) arrive(empty[position.slot]);
    } else {
      if (thread < kClusterCtas) arrive_in_cluster(empty[position.slot], thread);
    }
  }
};

}  // namespace ikbo::hopper
