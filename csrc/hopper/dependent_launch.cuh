// Programmatic dependent launch: a kernel that starts while the one before it on the stream ends.
#pragma once

namespace ikbo::hopper {

// Blocks until the kernels this one depends on have completed and their writes are visible. Returns
// at once where the launch was an ordinary one.
__device__ inline void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
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
