// Clusters: ranks, arrivals on the barriers of other CTAs, and their shared memory.
#include "entry.h"
#include "hopper/cluster.cuh"
#include "hopper/mbarrier.cuh"

namespace ikbo {
namespace {

// Each CTA arrives `rounds` times on the barrier of every CTA of its cluster, itself included, and
// waits each time for all. out[cta] = rank, cluster, clusters, rounds passed.
__global__ void __launch_bounds__(32) cluster_test_kernel(int size, int rounds, uint4* out) {
  __shared__ hopper::Barrier barrier;
  if (threadIdx.x == 0) {
    hopper::init(barrier, size);
    hopper::fence_barrier_init();
  }
  hopper::cluster_sync();
  uint32_t passed = 0;
  for (int round = 0; round < rounds; ++round) {
    if (threadIdx.x < size) hopper::arrive_in_cluster(barrier, threadIdx.x);
    hopper::wait(barrier, round % 2);
    __syncwarp();
    ++passed;
  }
  if (threadIdx.x == 0) {
    out[blockIdx.x] = {hopper::cluster_cta_rank(), hopper::cluster_index(), hopper::cluster_count(),
                       passed};
  }
  hopper::cluster_sync();
}

// Each thread stores its own number in its CTA and, 32 places further, in the next one of the
// cluster; then all load both of those of the CTA after that one.
__global__ void __launch_bounds__(32) cluster_memory_test_kernel(int size, float4* out) {
  __shared__ float4 numbers[64];
  const auto rank = hopper::cluster_cta_rank();
  const auto number = static_cast<float>(32 * blockIdx.x + threadIdx.x);
  numbers[threadIdx.x] = {number, -number, number + 0.25f, number + 0.5f};
  hopper::store_in_cluster(&numbers[32 + threadIdx.x], (rank + 1) % size, numbers[threadIdx.x]);
  hopper::cluster_sync();
  for (int i = 0; i < 2; ++i) {
    out[64 * blockIdx.x + 32 * i + threadIdx.x] =
        hopper::load_in_cluster(&numbers[32 * i + threadIdx.x], (rank + 2) % size);
  }
  hopper::cluster_sync();
}

}  // namespace
}  // namespace ikbo

IKBO_TEST_ENTRY ikbo_test_cluster(int size, int clusters, int rounds, void* out,
                                  cudaStream_t stream) {
  return ikbo::entry([&] {
    const ikbo::LaunchShape shape{static_cast<unsigned>(size * clusters), 32, 0, size};
    ikbo::launch(ikbo::cluster_test_kernel, shape, stream, size, rounds, static_cast<uint4*>(out));
  });
}

IKBO_TEST_ENTRY ikbo_test_cluster_memory(int size, int clusters, void* out, cudaStream_t stream) {
  return ikbo::entry([&] {
    const ikbo::LaunchShape shape{static_cast<unsigned>(size * clusters), 32, 0, size};
    ikbo::launch(ikbo::cluster_memory_test_kernel, shape, stream, size, static_cast<float4*>(out));
  });
}
