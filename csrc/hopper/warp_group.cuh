// Warps and warp groups: who am I, how many registers, electing a lane, named barriers.
#pragma once

#include <cstdint>

namespace ikbo::hopper {

inline constexpr int kWarpGroupThreads = 128;

// A value that is the same in all lanes, made known to the compiler as such: what follows from it,
// descriptors of wgmma for example, then stays in uniform registers.
__device__ inline int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// The thread's warp group of the CTA, and its warp.
__device__ inline int warp_group_index() { return uniform(threadIdx.x / kWarpGroupThreads); }
__device__ inline int warp_index() { return uniform(threadIdx.x / 32); }

// The thread's index in its warp group, kept in a register: the compiler would read the special
// register anew wherever it is used, about 50 clocks in the middle of a loop.
__device__ inline uint32_t thread_of_group() {
  uint32_t thread = threadIdx.x % kWarpGroupThreads;
  asm volatile("" : "+r"(thread));
  return thread;
}

// True in one lane of the (converged) warp.
__device__ inline bool elect_one() {
  uint32_t elected;
  asm volatile("{\n\t"
               ".reg .pred chosen;\n\t"
               "elect.sync _|chosen, 0xffffffff;\n\t"
               "selp.u32 %0, 1, 0, chosen;\n\t"
               "}"
               : "=r"(elected));
  return elected != 0;
}

// Moves the warp group's register budget. All four warps; the kernel must be compiled with a
// register cap (__launch_bounds__(threads, 1)) or ptxas ignores it.
template <int kRegisters>
__device__ inline void take_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Named barriers: each kernel numbers its own in an enum class from 1 (0 is __syncthreads).
// numbered() is one of several with one name, from it on. `threads` counts all who take part: those
// that wait and those that only arrive.
template <class Name>
__device__ constexpr Name numbered(Name name, int index) {
  return static_cast<Name>(static_cast<int>(name) + index);
}
template <class Name>
__device__ inline void barrier_wait(Name name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(name)), "r"(threads) : "memory");
}
template <class Name>
__device__ inline void barrier_arrive(Name name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(name)), "r"(threads) : "memory");
}

}  // namespace ikbo::hopper
