// Bulk copies of contiguous bytes from global to shared memory, and stores to the shared memory of
// another CTA of the cluster, both completing on an mbarrier; bulk copies back to global memory.
#pragma once

#include <cstdint>

#include "hopper/mbarrier.cuh"

namespace ikbo::hopper {

// All three multiples of 16.
__device__ inline void bulk_load(void* destination, const void* source, uint32_t bytes,
                                 Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
               "[%3];"
               :
               : "r"(shared_address(destination)), "l"(source), "r"(bytes),
                 "r"(shared_address(&barrier))
               : "memory");
}

// The way back. After fence_shared_for_async() by who wrote the source; in the thread's group of
// stores, as tma_store. All three multiples of 16.
__device__ inline void bulk_store(void* destination, const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(destination), "r"(shared_address(source)), "r"(bytes)
               : "memory");
}

// Tells the barrier of bytes to come without arriving. Before another thread's arrival ends the
// phase, with a __syncwarp() between.
__device__ inline void expect_bytes(Barrier& barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Stores to the same place of another CTA (or its own), and completes 16 bytes on the same barrier
// there. Who has waited for that barrier sees the value.
__device__ inline void store_async_in_cluster(float4* place, Barrier& barrier, uint32_t cta_rank,
                                              float4 value) {
  asm volatile("{\n\t"
               ".reg .b32 remote_place, remote_barrier;\n\t"
               "mapa.shared::cluster.u32 remote_place, %0, %2;\n\t"
               "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n\t"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote_place], "
               "{%3, %4, %5, %6}, [remote_barrier];\n\t"
               "}"
               :
               : "r"(shared_address(place)), "r"(shared_address(&barrier)), "r"(cta_rank),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

}  // namespace ikbo::hopper
