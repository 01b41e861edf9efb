// Kernels that start while the one before them ends.
#include "entry.h"
#include "hopper/dependent_launch.cuh"

namespace ikbo {
namespace {

// data[i] = 3 data[i - stride] + 1, wrapping around: each element needs another CTA's of the launch
// before. Reads one buffer and writes the other.
__global__ void __launch_bounds__(256)
    dependent_launch_test_kernel(const uint32_t* from, uint32_t* to, int size) {
  hopper::allow_next_kernel();
  hopper::wait_for_previous_kernel();
  __nanosleep(blockIdx.x % 8 * 1000);
  const int i = blockIdx.x * 256 + threadIdx.x;
  to[i] = 3 * from[(i + 1280) % size] + 1;
}

}  // namespace
}  // namespace ikbo

// a, b: [256 * ctas] each; after `launches` the last result is in a if the count is even, else in
// b.
IKBO_TEST_ENTRY ikbo_test_dependent_launch(int ctas, int launches, bool overlap, uint32_t* a,
                                           uint32_t* b, cudaStream_t stream) {
  return ikbo::entry([&] {
    const ikbo::LaunchShape shape{static_cast<unsigned>(ctas), 256, 0, 1, overlap};
    for (int i = 0; i < launches; ++i) {
      ikbo::launch(ikbo::dependent_launch_test_kernel, shape, stream, i % 2 ? b : a, i % 2 ? a : b,
                   256 * ctas);
    }
  });
}
