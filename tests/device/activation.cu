// The activations of csrc/kernels/activation.cuh, element by element.
#include "entry.h"
#include "kernels/activation.cuh"

namespace ikbo {
namespace {

__global__ void __launch_bounds__(256)
    activation_test_kernel(Activation activation, const float* x, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  with_activation(activation, [&](auto chosen) { y[i] = apply<decltype(chosen)::value>(x[i]); });
}

}  // namespace
}  // namespace ikbo

IKBO_TEST_ENTRY ikbo_test_activation(int activation, const float* x, float* y, int n,
                                     cudaStream_t stream) {
  return ikbo::entry([&] {
    ikbo::launch(ikbo::activation_test_kernel, {static_cast<unsigned>((n + 255) / 256), 256},
                 stream, static_cast<ikbo::Activation>(activation), x, y, n);
  });
}
