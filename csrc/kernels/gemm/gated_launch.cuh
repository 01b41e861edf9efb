// Host side of the GEMM with the gating epilogue, for the kernels in kGatedKernels.
#pragma once

#include <iterator>

#include "config/gated.h"
#include "kernels/gemm/gated_epilogue.cuh"
#include "kernels/gemm/gemm_launch.cuh"

namespace ikbo::gemm {

// Calls body(std::integral_constant<int, kernel>) for each of kGatedKernels.
template <class Body>
void for_each_gated_kernel(const Body& body) {
  [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    (body(std::integral_constant<int, kGatedKernels[kIndices]>{}), ...);
  }(std::make_index_sequence<std::size(kGatedKernels)>{});
}

// Beside the operands, of which b is the gate's weight.
struct GatedOperands {
  const void* b_up;
  int64_t b_up_stride;
  void* gate_preact;  // [M, N] contiguous, or both null
  void* up_preact;
};

// D = act(A Wg^T + bg) * (A Wu^T + bu), D of problem.N / 2 columns, by one kernel. The maps in
// `gated` are made here.
template <class T, int kKernel>
void launch_gated(const Operands& operands, const GatedOperands& more, const GemmProblem& problem,
                  const GemmConfig& config, GatedParams gated, cudaStream_t stream) {
  const int64_t columns = problem.N / 2;
  gated.columns = static_cast<int32_t>(columns);
  gated.has_preacts = more.gate_preact != nullptr;
  if (gated.has_preacts) {
    gated.gate_preact = operand_map<T>(more.gate_preact, problem.M, columns, columns, kStoreTile);
    gated.up_preact = operand_map<T>(more.up_preact, problem.M, columns, columns, kStoreTile);
  }
  gated.b_up =
      b_map<T, Shape<T, kKernel>, GatedEpilogue>(more.b_up, columns, problem.K, more.b_up_stride);
  launch_kernel<T, kKernel, GatedEpilogue>(operands, problem, config, gated, stream);
}

// The same by the config's kernel, one of kGatedKernels.
template <class T>
void run_gated(const Operands& operands, const GatedOperands& more, const GemmProblem& problem,
               const GemmConfig& config, const GatedParams& gated, cudaStream_t stream) {
  for_each_gated_kernel([&]<int kKernel>(std::integral_constant<int, kKernel>) {
    if (config.kernel != kKernel) return;
    launch_gated<T, kKernel>(operands, more, problem, config, gated, stream);
  });
}

template <class T>
void load_gated() {
  for_each_gated_kernel([&]<int kKernel>(std::integral_constant<int, kKernel>) {
    load_kernel(gemm_sm90<Shape<T, kKernel>, GatedEpilogue>);
  });
}

// Each type is compiled in a file of its own, instantiations/gated_*.cu.
#define IKBO_GATED_TEMPLATES(PREFIX, T)                                                        \
  PREFIX template void run_gated<T>(const Operands&, const GatedOperands&, const GemmProblem&, \
                                    const GemmConfig&, const GatedParams&, cudaStream_t);      \
  PREFIX template void load_gated<T>();
IKBO_GATED_TEMPLATES(extern, __half)
IKBO_GATED_TEMPLATES(extern, __nv_bfloat16)

}  // namespace ikbo::gemm
