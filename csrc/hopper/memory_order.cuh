// Flags between CTAs of a grid: data by ordinary stores, then a release; an acquire, then the data.
// And counters whose value alone matters.
#pragma once

#include <cstdint>
#include <cuda/ptx>

namespace ikbo::hopper {

// After a barrier of the writing threads, by one of them.
__device__ inline void add_release_gpu(uint32_t* flag, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Counts one more in global memory and returns what there was. `limit` is a number that is never
// reached, and that the compiler doesn't know: of plain adds ptxas lets one lane do the warp's,
// hands the result around and so waits for it at once, a trip to L2.
__device__ inline uint32_t count_relaxed_gpu(uint32_t* counter, uint32_t limit) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(limit)
               : "memory");
  return before;
}

__device__ inline void add_relaxed_gpu(uint32_t* counter, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
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
