// The kernels of the gated ops' backward for tests, in bfloat16 on raw pointers, all contiguous.

#include "entry.h"
#include "kernels/gemm/grad_launch.cuh"

namespace ikbo {
namespace {

constexpr int kMaxSharedBytes = 227 * 1024;
using T = __nv_bfloat16;

}  // namespace
}  // namespace ikbo

// grad_gate, grad_up and, unless null, hidden [M, N] of gate and up, where the hidden tensor's
// gradient is grad_out[M, K] w_down[K, N], by the kernel at that index of kGatedGradKernels.
IKBO_TEST_ENTRY ikbo_test_gated_grad(const void* grad_out, const void* w_down, const void* gate,
                                     const void* up, void* grad_gate, void* grad_up, void* hidden,
                                     int64_t M, int64_t N, int64_t K, int64_t activation,
                                     int64_t kernel, int64_t sms, int64_t l2_bytes,
                                     cudaStream_t stream) {
  return ikbo::entry([&] {
    using namespace ikbo;
    const DeviceLimits device{static_cast<int>(sms), l2_bytes, kMaxSharedBytes};
    const GemmProblem problem{M, N, K, 1};
    const GemmConfig config = gemm_config_of(kGatedGradKernels[kernel], problem, device);
    gemm::run_gated_grad<T>({grad_out, w_down, nullptr, K, N, 0},
                            {gate, up, grad_gate, grad_up, hidden}, problem, config,
                            static_cast<Activation>(activation), stream);
  });
}

// d[M, N] = a[M, K] b[K, N] + a_more b_more by the kernel at that index of kInputGradKernels.
IKBO_TEST_ENTRY ikbo_test_input_grad(const void* a, const void* b, const void* a_more,
                                     const void* b_more, void* d, int64_t M, int64_t N, int64_t K,
                                     int64_t kernel, int64_t sms, int64_t l2_bytes,
                                     cudaStream_t stream) {
  return ikbo::entry([&] {
    using namespace ikbo;
    const DeviceLimits device{static_cast<int>(sms), l2_bytes, kMaxSharedBytes};
    const GemmProblem problem{M, N, K, 1};
    const GemmConfig config = gemm_config_of(kInputGradKernels[kernel], problem, device);
    gemm::run_input_grad<T>({a, b, d, K, N, N}, a_more, K, b_more, N, problem, config, stream);
  });
}

namespace ikbo::gemm {
IKBO_GRAD_TEMPLATES(, __nv_bfloat16)
}  // namespace ikbo::gemm
