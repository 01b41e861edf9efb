// What waits do when nothing comes.
#include "entry.h"
#include "hopper/mbarrier.cuh"

namespace ikbo {
namespace {

__global__ void __launch_bounds__(32) trap_test_kernel() {
  __shared__ hopper::Barrier barrier;
  if (threadIdx.x == 0) {
    hopper::init(barrier, 1);
    hopper::fence_barrier_init();
  }
  __syncthreads();
  hopper::wait(barrier, 0);
}

}  // namespace
}  // namespace ikbo

IKBO_TEST_ENTRY ikbo_test_trap(cudaStream_t stream) {
  return ikbo::entry([&] { ikbo::launch(ikbo::trap_test_kernel, {1, 32}, stream); });
}
