// Counters between CTAs of a grid, whose value alone matters: they order nothing else.
#pragma once

#include <cstdint>
#include <cuda/ptx>

namespace ikbo::hopper {

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

}  // namespace ikbo::hopper
