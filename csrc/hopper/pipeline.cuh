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

  // By a whole warp, a barrier a lane: one thread would take 20 clocks for each. Then
  // fence_barrier_init(), and __syncthreads() or cluster_sync() before others use them.
  __device__ void init_by_warp() {
    static_assert(2 * kSlots <= 32);
    const uint32_t lane = threadIdx.x % 32;
    if (lane < kSlots) {
      hopper::init(full[lane], kFullArrivals);
    } else if (lane < 2 * kSlots) {
      hopper::init(empty[lane - kSlots], kEmptyArrivals);
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

  // The same without waiting. Asked while products run, it takes the wait's latency (about 80
  // clocks even where the block is there) out of the way to the next products.
  __device__ bool is_full(const Position& position) {
    return has_completed(full[position.slot], position.phase);
  }

  // Consumer, all threads of a warp group, after wgmma_wait() has ended their products on the slot.
  // A group that reads it by ordinary loads or ldmatrix meets at a barrier first: one thread
  // arrives for all. `thread`: the calling thread's index in its group.
  __device__ void release(int slot, uint32_t thread = threadIdx.x % kWarpGroupThreads) {
    if constexpr (kClusterCtas == 1) {
      if (thread == 0) arrive(empty[slot]);
    } else {
      if (thread < kClusterCtas) arrive_in_cluster(empty[slot], thread);
    }
  }
};

}  // namespace ikbo::hopper
