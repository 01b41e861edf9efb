// Flags between CTAs of a grid: data by ordinary stores, then a release; an acquire, then the data.
// And counters between the warps of a CTA.
#pragma once

#include <cstdint>
#include <cuda/ptx>

#include "hopper/mbarrier.cuh"

namespace ikbo::hopper {

// Adds to a counter in shared memory and returns what it was. What its callers before have read and
// written is done with; by one lane, after a __syncwarp().
__device__ inline uint32_t add_acq_rel_cta(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(shared_address(counter)), "r"(value)
               : "memory");
  return before;
}

// After a barrier of the writing threads, by one of them.
__device__ inline void add_release_gpu(uint32_t* flag, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ inline uint32_t load_relaxed_gpu(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ inline uint32_t load_acquire_gpu(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// By one thread, before a barrier of those who read the data. Spins until *flag >= target; traps
// after about ten seconds, as wait() of an mbarrier does. Each acquire drops the SM's L1, so only
// the last load is one.
__device__ inline void wait_flag_gpu(const uint32_t* flag, uint32_t target) {
  constexpr uint32_t kTries = 1u << 24;  // a try is a trip to L2
  for (uint32_t tries = 0; load_relaxed_gpu(flag) < target; ++tries) {
    if (tries == kTries) __trap();
  }
  load_acquire_gpu(flag);
}

}  // namespace ikbo::hopper
