// Clusters of CTAs.
#pragma once

#include <cstdint>
#include <cuda/ptx>

#include "hopper/mbarrier.cuh"

namespace ikbo::hopper {

__device__ inline uint32_t cluster_cta_rank() { return cuda::ptx::get_sreg_cluster_ctarank(); }

// Along x, as the clusters of launch() lie.
__device__ inline uint32_t cluster_index() { return cuda::ptx::get_sreg_clusterid_x(); }
__device__ inline uint32_t cluster_count() { return cuda::ptx::get_sreg_nclusterid_x(); }

// All threads of all CTAs of the cluster meet; shared memory written before, their own and one
// another's, is visible after. The last thing of a kernel whose CTAs arrive on one another's
// barriers, multicast or store into one another: a CTA's shared memory must outlive what its peers
// send there.
__device__ inline void cluster_sync() {
  cuda::ptx::barrier_cluster_arrive(cuda::ptx::sem_release);
  cuda::ptx::barrier_cluster_wait(cuda::ptx::sem_acquire);
}

// Stores to the same place of another CTA's shared memory. For those who read it after a
// cluster_sync().
__device__ inline void store_in_cluster(float4* place, uint32_t cta_rank, float4 value) {
  asm volatile("{\n\t"
               ".reg .b32 remote;\n\t"
               "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
               "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5};\n\t"
               "}"
               :
               : "r"(shared_address(place)), "r"(cta_rank), "f"(value.x), "f"(value.y),
                 "f"(value.z), "f"(value.w)
               : "memory");
}

// Loads from the same place of another CTA's shared memory, written before a cluster_sync(). That
// CTA stays until another one.
__device__ inline float load_in_cluster(const float* place, uint32_t cta_rank) {
  float value;
  asm volatile("{\n\t"
               ".reg .b32 remote;\n\t"
               "mapa.shared::cluster.u32 remote, %1, %2;\n\t"
               "ld.shared::cluster.f32 %0, [remote];\n\t"
               "}"
               : "=f"(value)
               : "r"(shared_address(place)), "r"(cta_rank)
               : "memory");
  return value;
}
__device__ inline float4 load_in_cluster(const float4* place, uint32_t cta_rank) {
  float4 value;
  asm volatile("{\n\t"
               ".reg .b32 remote;\n\t"
               "mapa.shared::cluster.u32 remote, %4, %5;\n\t"
               "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n\t"
               "}"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(shared_address(place)), "r"(cta_rank)
               : "memory");
  return value;
}

}  // namespace ikbo::hopper
