// Rows gathered into shared memory, with an mbarrier to say when.
#include "entry.h"
#include "hopper/async_copy.cuh"

namespace ikbo {
namespace {

// The first warp gathers 32 rows of 16 bytes a round, those with index >= 0; the second reads them.
// rows [rounds, 32], source [n, 4], out [rounds, 32, 4].
__global__ void __launch_bounds__(64)
    async_copy_test_kernel(int rounds, const int* rows, const uint4* source, uint4* out) {
  __shared__ uint4 gathered[2][32];
  __shared__ hopper::Barrier full[2];
  __shared__ hopper::Barrier empty[2];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) hopper::init(full[i], 32), hopper::init(empty[i], 32);
    hopper::fence_barrier_init();
  }
  gathered[threadIdx.x / 32][lane] = {1, 2, 3, 4};
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    const int slot = round % 2;
    const uint32_t phase = round / 2 % 2;
    if (threadIdx.x < 32) {
      hopper::wait(empty[slot], phase ^ 1);
      const int row = rows[32 * round + lane];
      if (row >= 0) hopper::copy_async_16(&gathered[slot][lane], source + row);
      hopper::arrive_after_copies(full[slot]);
    } else {
      hopper::wait(full[slot], phase);
      out[32 * round + lane] = gathered[slot][31 - lane];
      gathered[slot][31 - lane] = {1, 2, 3, 4};
      hopper::arrive(empty[slot]);
    }
  }
}

}  // namespace
}  // namespace ikbo

IKBO_TEST_ENTRY ikbo_test_async_copy(int rounds, const int* rows, const void* source, void* out,
                                     cudaStream_t stream) {
  return ikbo::entry([&] {
    ikbo::launch(ikbo::async_copy_test_kernel, {1, 64}, stream, rounds, rows,
                 static_cast<const uint4*>(source), static_cast<uint4*>(out));
  });
}
