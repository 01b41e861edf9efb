// The copy engine: tiles of 2 to 4 dimensional tensors between global and shared memory.
// Coordinates are in elements, innermost dimension first. Out-of-range elements read as zero and
// are not written.
#pragma once

#include <cuda.h>  // CUtensorMap

#include <cstdint>
#include <cuda/ptx>

#include "hopper/mbarrier.cuh"

namespace ikbo::hopper {

// L2 eviction policies in createpolicy's encoding, for tma_load's and tma_store's hint.
enum class L2Hint : uint64_t {
  kNormal = 0x1000000000000000,
  kEvictFirst = 0x12f0000000000000,
  kEvictLast = 0x14f0000000000000,
};

__device__ inline void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Brings 32 bytes, and what lies around them, into L2, where they are read from later. Also before
// wait_for_previous_kernel(): nothing is read, and what that kernel writes it writes to L2.
__device__ inline void prefetch_global(const void* place) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(place) : "memory");
}

// Loads one box into `destination` (128-byte aligned; 1024 where the map swizzles by 128 bytes) and
// completes its bytes, those out of range included, on `barrier`. One thread calls it, after
// arrive_expect_bytes. The map is a __grid_constant__ parameter of the kernel.
__device__ inline void tma_load(void* destination, const CUtensorMap& map, Barrier& barrier,
                                L2Hint hint, int32_t x, int32_t y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
               :
               : "r"(shared_address(destination)), "l"(&map), "r"(shared_address(&barrier)), "r"(x),
                 "r"(y), "l"(static_cast<uint64_t>(hint))
               : "memory");
}
__device__ inline void tma_load(void* destination, const CUtensorMap& map, Barrier& barrier,
                                L2Hint hint, int32_t x, int32_t y, int32_t z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;"
               :
               : "r"(shared_address(destination)), "l"(&map), "r"(shared_address(&barrier)), "r"(x),
                 "r"(y), "r"(z), "l"(static_cast<uint64_t>(hint))
               : "memory");
}
__device__ inline void tma_load(void* destination, const CUtensorMap& map, Barrier& barrier,
                                L2Hint hint, int32_t x, int32_t y, int32_t z, int32_t w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
               :
               : "r"(shared_address(destination)), "l"(&map), "r"(shared_address(&barrier)), "r"(x),
                 "r"(y), "r"(z), "r"(w), "l"(static_cast<uint64_t>(hint))
               : "memory");
}

// Loads one box into the same place of every CTA in `cta_mask` (bit = rank in the cluster) and
// completes its bytes on each one's own barrier.
__device__ inline void tma_load_multicast(void* destination, const CUtensorMap& map,
                                          Barrier& barrier, L2Hint hint, uint16_t cta_mask,
                                          int32_t x, int32_t y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".multicast::cluster.L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3, %6;"
               :
               : "r"(shared_address(destination)), "l"(&map), "r"(shared_address(&barrier)),
                 "h"(cta_mask), "r"(x), "r"(y), "l"(static_cast<uint64_t>(hint))
               : "memory");
}
__device__ inline void tma_load_multicast(void* destination, const CUtensorMap& map,
                                          Barrier& barrier, L2Hint hint, uint16_t cta_mask,
                                          int32_t x, int32_t y, int32_t z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".multicast::cluster.L2::cache_hint [%0], [%1, {%4, %5, %6}], [%2], %3, %7;"
               :
               : "r"(shared_address(destination)), "l"(&map), "r"(shared_address(&barrier)),
                 "h"(cta_mask), "r"(x), "r"(y), "r"(z), "l"(static_cast<uint64_t>(hint))
               : "memory");
}
__device__ inline void tma_load_multicast(void* destination, const CUtensorMap& map,
                                          Barrier& barrier, L2Hint hint, uint16_t cta_mask,
                                          int32_t x, int32_t y, int32_t z, int32_t w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".multicast::cluster.L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3, %8;"
               :
               : "r"(shared_address(destination)), "l"(&map), "r"(shared_address(&barrier)),
                 "h"(cta_mask), "r"(x), "r"(y), "r"(z), "r"(w), "l"(static_cast<uint64_t>(hint))
               : "memory");
}

// Orders this thread's ordinary accesses of shared memory before later ones by the copy engine or
// wgmma. Each writing thread calls it, then all meet at a barrier, then one stores; or all meet and
// the one that stores calls it: it has to be on the way from the write to the store.
__device__ inline void fence_shared_for_async() {
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

// Stores one box; what lies out of range is dropped. One thread calls it.
__device__ inline void tma_store(const CUtensorMap& map, const void* source, L2Hint hint, int32_t x,
                                 int32_t y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint"
               " [%0, {%2, %3}], [%1], %4;"
               :
               : "l"(&map), "r"(shared_address(source)), "r"(x), "r"(y),
                 "l"(static_cast<uint64_t>(hint))
               : "memory");
}
__device__ inline void tma_store(const CUtensorMap& map, const void* source, L2Hint hint, int32_t x,
                                 int32_t y, int32_t z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint"
               " [%0, {%2, %3, %4}], [%1], %5;"
               :
               : "l"(&map), "r"(shared_address(source)), "r"(x), "r"(y), "r"(z),
                 "l"(static_cast<uint64_t>(hint))
               : "memory");
}
__device__ inline void tma_store(const CUtensorMap& map, const void* source, L2Hint hint, int32_t x,
                                 int32_t y, int32_t z, int32_t w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint"
               " [%0, {%2, %3, %4, %5}], [%1], %6;"
               :
               : "l"(&map), "r"(shared_address(source)), "r"(x), "r"(y), "r"(z), "r"(w),
                 "l"(static_cast<uint64_t>(hint))
               : "memory");
}

// Closes the calling thread's group of stores.
__device__ inline void tma_store_commit() { cuda::ptx::cp_async_bulk_commit_group(); }

// Waits until all but the last kGroups groups of this thread have read their shared memory, which
// may then be overwritten.
template <int kGroups>
__device__ inline void tma_store_wait_read() {
  cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<kGroups>{});
}

// Waits until they have been written to global memory.
template <int kGroups>
__device__ inline void tma_store_wait() {
  cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<kGroups>{});
}

}  // namespace ikbo::hopper
