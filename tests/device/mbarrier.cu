// What waits do when nothing comes.
#include "entry.h"
#include "hopper/mbarrier.cuh"
#include "hopper/memory_order.cuh"

namespace ikbo {
namespace {

__global__ void __launch_bounds__(32) trap_test_kernel(bool on_flag, const uint32_t* zero) {
  __shared__ hopper::Barrier barrier;
  if (threadIdx.x == 0) {
    hopper::init(barrier, 1);
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (on_flag) {
    hopper::wait_flag_gpu(zero, 1);
  } else {
    hopper::wait(barrier, 0);
  }
}

}  // namespace
}  // namespace ikbo

IKBO_TEST_ENTRY ikbo_test_trap(bool on_flag, const uint32_t* zero, cudaStream_t stream) {
  return ikbo::entry([&] { ikbo::launch(ikbo::trap_test_kernel, {1, 32}, stream, on_flag, zero); });
}
