// Data handed from CTA to CTA through flags in global memory.
#include "entry.h"
#include "hopper/mbarrier.cuh"
#include "hopper/memory_order.cuh"
#include "hopper/tma.cuh"
#include "launch/tensor_map.h"

namespace ikbo {
namespace {

constexpr int kWidth = 256;

// data[b] = data[b - 1] + 1, a CTA a row: each waits for the one before. Row 0 is given. The
// neighbour's row is read by ordinary loads or by the copy engine. All CTAs run at once.
__global__ void __launch_bounds__(kWidth)
    flags_test_kernel(const __grid_constant__ CUtensorMap map, bool by_copy_engine, float* data,
                      uint32_t* flags) {
  __shared__ __align__(128) float row[kWidth];
  __shared__ hopper::Barrier barrier;
  const int b = blockIdx.x + 1;
  if (threadIdx.x == 0) {
    hopper::init(barrier, 1);
    hopper::fence_barrier_init();
    if (b > 1) hopper::wait_flag_gpu(&flags[b - 1], 1);
    if (by_copy_engine) {
      hopper::fence_global_for_async();
      hopper::arrive_expect_bytes(barrier, sizeof(row));
      hopper::tma_load(row, map, barrier, hopper::L2Hint::kNormal, 0, b - 1);
    }
  }
  __syncthreads();
  float value;
  if (by_copy_engine) {
    hopper::wait(barrier, 0);
    value = row[threadIdx.x];
  } else {
    value = data[(b - 1) * kWidth + threadIdx.x];
  }
  data[b * kWidth + threadIdx.x] = value + 1;
  hopper::fence_global_for_async();
  __syncthreads();
  if (threadIdx.x == 0) hopper::add_release_gpu(&flags[b], 1);
}

}  // namespace
}  // namespace ikbo

// data[rows][256]; flags[rows], zero. At most as many rows as the GPU has SMs.
IKBO_TEST_ENTRY ikbo_test_flags(int rows, bool by_copy_engine, float* data, uint32_t* flags,
                                cudaStream_t stream) {
  using namespace ikbo;
  return entry([&] {
    const CUtensorMap map = make_tensor_map(data, ElementType::kFloat32, {kWidth, rows},
                                            {kWidth * 4}, {kWidth, 1}, Swizzle::kNone);
    launch(flags_test_kernel, {static_cast<unsigned>(rows - 1), kWidth}, stream, map,
           by_copy_engine, data, flags);
  });
}
