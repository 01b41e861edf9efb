// The warp's matrix product.
#include "entry.h"
#include "hopper/mma.cuh"

namespace ikbo {
namespace {

// d[16, 8] += a[16, 16] b[8, 16]^T.
template <class T>
__global__ void __launch_bounds__(32)
    mma_test_kernel(const uint32_t* a, const uint32_t* b, float* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const auto pair = [&](const uint32_t* matrix, int row, int k) { return matrix[8 * row + k / 2]; };
  float* mine[4] = {&d[8 * g + 2 * t], &d[8 * g + 2 * t + 1], &d[8 * (g + 8) + 2 * t],
                    &d[8 * (g + 8) + 2 * t + 1]};
  float sums[4] = {*mine[0], *mine[1], *mine[2], *mine[3]};
  hopper::multiply_16x8<T>(
      sums,
      {pair(a, g, 2 * t), pair(a, g + 8, 2 * t), pair(a, g, 2 * t + 8), pair(a, g + 8, 2 * t + 8)},
      {pair(b, g, 2 * t), pair(b, g, 2 * t + 8)});
  for (int i = 0; i < 4; ++i) *mine[i] = sums[i];
}

}  // namespace
}  // namespace ikbo

IKBO_TEST_ENTRY ikbo_test_mma(bool is_bfloat16, const uint32_t* a, const uint32_t* b, float* d,
                              cudaStream_t stream) {
  return ikbo::entry([&] {
    ikbo::launch(is_bfloat16 ? ikbo::mma_test_kernel<__nv_bfloat16> : ikbo::mma_test_kernel<__half>,
                 {1, 32}, stream, a, b, d);
  });
}
