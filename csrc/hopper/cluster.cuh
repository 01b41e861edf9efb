// Clusters of CTAs.
#pragma once

#include <cuda/ptx>

#include <cstdint>

namespace ikbo::hopper {

__device__ inline uint32_t cluster_cta_rank() { return cuda::ptx::get_sreg_cluster_ctarank(); }

// All threads of all CTAs of the cluster meet; shared memory written before is visible after.
__device__ inline void cluster_sync() {
  cuda::ptx::barrier_cluster_arrive(cuda::ptx::sem_release);
  cuda::ptx::barrier_cluster_wait(cuda::ptx::sem_acquire);
}

}  // namespace ikbo::hopper
