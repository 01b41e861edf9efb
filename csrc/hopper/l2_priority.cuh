// How long what a load brings into the L2 cache stays there.
#pragma once

#include <cstdint>

namespace ikbo::hopper {

// For loads with an L2 cache hint: lines that go after all others, if `last`, or ordinary ones. It
// takes no instructions but for constants; asked for again in a loop it needn't stay in registers.
__device__ inline uint64_t evict_last_if(bool last) {
  uint64_t evict_last, evict_normal;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(evict_last));
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(evict_normal));
  return last ? evict_last : evict_normal;
}

// Makes the line of 128 bytes that begins here, if one does, an ordinary one again: of those that
// are in the cache when a kernel ends the next ones would have less of it. By threads that have
// each a part of what is contiguous.
__device__ inline void evict_as_others(const char* address) {
  if (reinterpret_cast<uintptr_t>(address) % 128 == 0) {
    asm volatile("applypriority.global.L2::evict_normal [%0], 128;" : : "l"(address) : "memory");
  }
}

}  // namespace ikbo::hopper
