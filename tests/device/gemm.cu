// The plain GEMM for tests: any kernel of the table on raw pointers.

#include <stdexcept>

#include "entry.h"
#include "kernels/gemm/gemm_launch.cuh"

// D[M, N] = A[M, K] B[N, K]^T by the kernel of that index, or by the config's choice for -1.
IKBO_TEST_ENTRY ikbo_test_gemm(const void* a, const void* b, void* d, int64_t M, int64_t N,
                               int64_t K, int64_t a_stride, int64_t b_stride, int64_t d_stride,
                               int is_bfloat16, int kernel, int sms, int64_t l2_bytes,
                               cudaStream_t stream) {
  return ikbo::entry([&] {
    constexpr int kMaxSharedBytes = 227 * 1024;
    const ikbo::GemmProblem problem{M, N, K, 1};
    const ikbo::DeviceLimits device{sms, l2_bytes, kMaxSharedBytes};
    const auto config = kernel < 0 ? ikbo::gemm_config(problem, device)
                                   : ikbo::gemm_config_of(kernel, problem, device);
    if (!config) throw std::runtime_error("expected a problem that a kernel takes");
    const ikbo::gemm::Operands operands{a, b, d, a_stride, b_stride, d_stride};
    if (is_bfloat16) {
      ikbo::gemm::run_gemm<__nv_bfloat16>(operands, problem, *config, stream);
    } else {
      ikbo::gemm::run_gemm<__half>(operands, problem, *config, stream);
    }
  });
}
