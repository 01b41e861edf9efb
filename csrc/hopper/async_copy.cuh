// Copies of 16 bytes from global to shared memory that take no registers: for rows gathered from
// anywhere, which no box of the copy engine covers, and for what a thread keeps to itself.
#pragma once

#include <cstdint>

#include "hopper/mbarrier.cuh"

namespace ikbo::hopper {

// Both sides 16-byte aligned. The data also stays in L1, for rows that many ask for.
__device__ inline void copy_async_16(void* destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;"
               :
               : "r"(shared_address(destination)), "l"(source)
               : "memory");
}

// The same past L1, of what is read once: `bytes` of the 16, and zeros in place of the others.
__device__ inline void copy_async_16_zero_filled(uint32_t destination, const void* source,
                                                 int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(destination), "l"(source), "r"(bytes)
               : "memory");
}

// The same with a priority in the L2 cache: see l2_priority.cuh.
__device__ inline void copy_async_16_zero_filled(uint32_t destination, const void* source,
                                                 int bytes, uint64_t priority) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               :
               : "r"(destination), "l"(source), "r"(bytes), "l"(priority)
               : "memory");
}

// A float, or zero where it isn't `there`.
__device__ inline void copy_async_4_or_zero(float* destination, const float* source, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :
               : "r"(shared_address(destination)), "l"(source), "r"(there ? 4 : 0)
               : "memory");
}

// The thread's copies since the last time are a group, which may be empty; blocks until all but the
// last kPending groups have landed.
__device__ inline void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_for_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Blocks until all of the thread's copies have landed.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The thread arrives once all of its copies so far have landed: at once where it has none.
__device__ inline void arrive_after_copies(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];"
               :
               : "r"(shared_address(&barrier))
               : "memory");
}

}  // namespace ikbo::hopper
