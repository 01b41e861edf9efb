// Host side of the GEMMs of the gated ops' backward, for kGatedGradKernels and kInputGradKernels.
#pragma once

#include <iterator>

#include "config/gated.h"
#include "kernels/gemm/gated_grad_epilogue.cuh"
#include "kernels/gemm/gemm_launch.cuh"

namespace ikbo::gemm {

// Calls body(std::integral_constant<int, kernel>) for each of kGatedGradKernels.
template <class Body>
void for_each_gated_grad_kernel(const Body& body) {
  [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    (body(std::integral_constant<int, kGatedGradKernels[kIndices]>{}), ...);
  }(std::make_index_sequence<std::size(kGatedGradKernels)>{});
}
// Likewise of kInputGradKernels.
template <class Body>
void for_each_input_grad_kernel(const Body& body) {
  [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    (body(std::integral_constant<int, kInputGradKernels[kIndices]>{}), ...);
  }(std::make_index_sequence<std::size(kInputGradKernels)>{});
}

// [M, N] contiguous, 16-byte aligned.
struct GatedGradTensors {
  const void* gate;
  const void* up;
  void* grad_gate;
  void* grad_up;
  void* hidden;  // or null
};

// Gradients at the pre-activations of act(gate) * up, whose own gradient is A B: A = operands.a
// [M, K] and B = operands.b [K, N]; d isn't used.
template <class T>
void run_gated_grad(const Operands& operands, const GatedGradTensors& tensors,
                    const GemmProblem& problem, const GemmConfig& config, Activation activation,
                    cudaStream_t stream) {
  const auto map = [&](const void* base) {
    return operand_map<T>(base, problem.M, problem.N, problem.N, kStoreTile);
  };
  GatedGradMaps grad{};
  grad.gate = map(tensors.gate);
  grad.up = map(tensors.up);
  grad.grad_up = map(tensors.grad_up);
  grad.activation = activation;
  grad.has_hidden = tensors.hidden != nullptr;
  if (grad.has_hidden) grad.hidden = map(tensors.hidden);
  Operands all = operands;
  all.d = tensors.grad_gate;
  all.d_stride = problem.N;
  for_each_gated_grad_kernel([&]<int kKernel>(std::integral_constant<int, kKernel>) {
    if (config.kernel != kKernel) return;
    launch_kernel<T, kKernel, GatedGradEpilogue>(all, problem, config, grad, stream);
  });
}

// D = A B + A' B': A, A' [M, K], B, B' [K, N], where the problem is of one term.
template <class T>
void run_input_grad(const Operands& operands, const void* a_more, int64_t a_more_stride,
                    const void* b_more, int64_t b_more_stride, const GemmProblem& problem,
                    const GemmConfig& config, cudaStream_t stream) {
  for_each_input_grad_kernel([&]<int kKernel>(std::integral_constant<int, kKernel>) {
    if (config.kernel != kKernel) return;
    using S = Shape<T, kKernel>;
    const TwoTerms more{
        operand_map<T>(a_more, problem.M, problem.K, a_more_stride, S::kTileM),
        b_map<T, S, InputGradEpilogue>(b_more, problem.N, problem.K, b_more_stride)};
    launch_kernel<T, kKernel, InputGradEpilogue>(operands, problem, config, more, stream);
  });
}

template <class T>
void load_grad() {
  for_each_gated_grad_kernel([&]<int kKernel>(std::integral_constant<int, kKernel>) {
    load_kernel(gemm_sm90<Shape<T, kKernel, GatedGradEpilogue::kBuffers>, GatedGradEpilogue>);
  });
  for_each_input_grad_kernel([&]<int kKernel>(std::integral_constant<int, kKernel>) {
    load_kernel(gemm_sm90<Shape<T, kKernel>, InputGradEpilogue>);
  });
}

// Each type is compiled in a file of its own, instantiations/grad_*.cu.
#define IKBO_GRAD_TEMPLATES(PREFIX, T)                                                       \
  PREFIX template void run_gated_grad<T>(const Operands&, const GatedGradTensors&,           \
                                         const GemmProblem&, const GemmConfig&, Activation,  \
                                         cudaStream_t);                                      \
  PREFIX template void run_input_grad<T>(const Operands&, const void*, int64_t, const void*, \
                                         int64_t, const GemmProblem&, const GemmConfig&,     \
                                         cudaStream_t);                                      \
  PREFIX template void load_grad<T>();
IKBO_GRAD_TEMPLATES(extern, __half)
IKBO_GRAD_TEMPLATES(extern, __nv_bfloat16)

}  // namespace ikbo::gemm
