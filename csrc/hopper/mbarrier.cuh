// mbarriers in shared memory: the arrival and transaction counters a TMA load completes on.
#pragma once

#include <cstdint>
#include <cuda/ptx>

namespace ikbo::hopper {

// One mbarrier. `phase` is the parity of the phase waited for: 0 first, then alternating.
using Barrier = uint64_t;

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// By one thread, before fence_barrier_init() and a barrier of all who use it.
__device__ inline void init(Barrier& barrier, uint32_t arrivals) {
  cuda::ptx::mbarrier_init(&barrier, arrivals);
}

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ inline void fence_barrier_init() {
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

__device__ inline void arrive(Barrier& barrier) {
  cuda::ptx::mbarrier_arrive(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared,
                             &barrier);
}

// Arrives and tells the barrier to expect this many bytes of TMA loads in the phase.
__device__ inline void arrive_expect_bytes(Barrier& barrier, uint32_t bytes) {
  cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta,
                                       cuda::ptx::space_shared, &barrier, bytes);
}

// Arrives on the same barrier of another CTA of the cluster. Written by hand because every form of
// cuda::ptx carries .release.cluster, which ptxas turns into a MEMBAR.ALL.GPU for each k block.
// What is handed over here is the right to overwrite shared memory, and the reads of it (wgmma)
// have completed before the arrival.
__device__ inline void arrive_in_cluster(Barrier& barrier, uint32_t cta_rank) {
  asm volatile("{\n\t"
               ".reg .b32 remote;\n\t"
               "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
               "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t"
               "}"
               :
               : "r"(shared_address(&barrier)), "r"(cta_rank)
               : "memory");
}

// Whether the phase with this parity has completed, at once.
__device__ inline bool has_completed(Barrier& barrier, uint32_t phase) {
  return cuda::ptx::mbarrier_test_wait_parity(&barrier, phase);
}

// Spins until the phase with this parity has completed. A phase that never completes is a bug
// elsewhere: after some ten seconds the kernel traps instead of hanging the GPU.
__device__ inline void wait(Barrier& barrier, uint32_t phase) {
  constexpr uint32_t kTries = 1u << 22;  // a failed try suspends the thread for up to 4 us
  for (uint32_t tries = 0; !cuda::ptx::mbarrier_try_wait_parity(&barrier, phase); ++tries) {
    if (tries == kTries) __trap();
  }
}

}  // namespace ikbo::hopper
