// Flags between CTAs of a grid: data by ordinary stores, then a release; an acquire, then the data.
#pragma once

#include <cuda/ptx>

#include <cstdint>

namespace ikbo::hopper {

// After a barrier of the writing threads, by one of them.
__device__ inline void add_release_gpu(uint32_t* flag, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ inline uint32_t load_acquire_gpu(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Spins until *flag >= target; traps after about ten seconds, as wait() of an mbarrier does.
__device__ inline void wait_flag_gpu(const uint32_t* flag, uint32_t target) {
  constexpr uint32_t kTries = 1u << 27;
  for (uint32_t tries = 0; load_acquire_gpu(flag) < target; ++tries) {
    if (tries == kTries) __trap();
    __nanosleep(64);
  }
}

}  // namespace ikbo::hopper
