// Programmatic dependent launch: a kernel that starts while the one before it on the stream ends.
#pragma once

#include <cstdint>

namespace ikbo::hopper {

// Blocks until the kernels this one depends on have completed and their writes are visible. Returns
// at once where the launch was an ordinary one.
__device__ inline void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// A __grid_constant__ parameter's lines of constant memory are cold when a kernel starts, and each
// is a trip to L2 for who reads it first. Before wait_for_previous_kernel() the trips cost nothing.
template <class Parameter>
__device__ inline void touch(const Parameter& parameter) {
  constexpr int kLine = 64 / sizeof(uint32_t), kWords = sizeof(Parameter) / sizeof(uint32_t);
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(&parameter);
  uint32_t all = words[kWords - 1];
#pragma unroll
  for (int i = 0; i < kWords; i += kLine) all ^= words[i];
  // Something that the assembler can't leave out.
  asm volatile("{\n\t"
               ".reg .pred never;\n\t"
               "setp.eq.u32 never, %0, 0x9e3779b9;\n\t"
               "@never nanosleep.u32 0;\n\t"
               "}" ::"r"(all));
}

// Lets the next kernel of the stream start launching its CTAs, once all CTAs have said so or ended.
// It may not read this one's results before it has waited. After wait_for_previous_kernel() where
// this one was launched to overlap: then the next one needn't fear what is ahead of this. Said
// earlier, the next one may count on nothing before its own wait, which is for this one's end and
// so for what is ahead as well.
__device__ inline void allow_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace ikbo::hopper
