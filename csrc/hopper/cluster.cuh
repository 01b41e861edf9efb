// Clusters of CTAs.
#pragma once

#include <cstdint>
#include <cuda/ptx>

namespace ikbo::hopper {

__device__ inline uint32_t cluster_cta_rank() { return cuda::ptx::get_sreg_cluster_ctarank(); }

// Along x, as the clusters of launch() lie.
__device__ inline uint32_t cluster_index() { return cuda::ptx::get_sreg_clusterid_x(); }
__device__ inline uint32_t cluster_count() { return cuda::ptx::get_sreg_nclusterid_x(); }

// All threads of all CTAs of the cluster meet; shared memory written before is visible after.
// The last thing of a kernel whose CTAs arrive on one another's barriers or multicast: a CTA's
// shared memory must outlive what its peers send there.
__device__ inline void cluster_sync() {
  cuda::ptx::barrier_cluster_arrive(cuda::ptx::sem_release);
  cuda::ptx::barrier_cluster_wait(cuda::ptx::sem_acquire);
}

}  // namespace ikbo::hopper
