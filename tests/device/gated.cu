// The gating GEMM for tests: any kernel of the table on raw pointers.

#include "entry.h"
#include "kernels/gemm/gated_launch.cuh"

// out[M, N] = gelu_tanh(x w_gate^T + b_gate) * (x w_up^T + b_up) in bfloat16 by the kernel of that
// index, or by the model's choice for -1. All contiguous; biases and pre-activations (both or
// none) may be null.
IKBO_TEST_ENTRY ikbo_test_gated(const void* x, const void* w_gate, const void* w_up,
                                const void* b_gate, const void* b_up, void* out, void* gate_preact,
                                void* up_preact, int64_t M, int64_t N, int64_t K, int64_t kernel,
                                int64_t sms, int64_t l2_bytes, cudaStream_t stream) {
  return ikbo::entry([&] {
    using namespace ikbo;
    using T = __nv_bfloat16;
    constexpr int kMaxSharedBytes = 227 * 1024;
    const DeviceLimits device{static_cast<int>(sms), l2_bytes, kMaxSharedBytes};
    const GemmProblem problem = gated_model::gated_product({M, N, K});
    const int index = kernel < 0 ? gemm_model::best_of(kGatedKernels, problem, device,
                                                       gated_model::kEpilogueClocks)
                                       .kernel
                                 : static_cast<int>(kernel);
    const GemmConfig config = gemm_config_of(index, problem, device);
    const gemm::Operands operands{x, w_gate, out, K, K, N};
    gemm::GatedParams gated{};
    gated.gate_bias = b_gate;
    gated.up_bias = b_up;
    gated.activation = Activation::kGeluTanh;
    const auto launch_if = [&]<int kKernel>(std::integral_constant<int, kKernel>) {
      // Each weight has half of a tile, in whole pieces of 64 columns.
      if constexpr (kGemmKernels[kKernel].tile_n % 128 == 0) {
        if (config.kernel != kKernel) return;
        gemm::launch_gated<T, kKernel>(operands, {w_up, K, gate_preact, up_preact}, problem, config,
                                       gated, stream);
      }
    };
    [&]<int... kKernels>(std::integer_sequence<int, kKernels...>) {
      (launch_if(std::integral_constant<int, kKernels>{}), ...);
    }(std::make_integer_sequence<int, kGemmKernelCount>{});
  });
}
