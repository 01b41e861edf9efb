// Clusters: ranks, and arrivals on the barriers of other CTAs.
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

}  // namespace
}  // namespace ikbo

IKBO_TEST_ENTRY ikbo_test_cluster(int size, int clusters, int rounds, void* out,
                                  cudaStream_t stream) {
  return ikbo::entry([&] {
    const ikbo::LaunchShape shape{static_cast<unsigned>(size * clusters), 32, 0, size};
    ikbo::launch(ikbo::cluster_test_kernel, shape, stream, size, rounds, static_cast<uint4*>(out));
  });
}
