// Host side of the GEMM with the joining epilogue, for the kernels in kJoinKernels.
#pragma once

#include <iterator>

#include "config/concat_linear.h"
#include "kernels/gemm/gemm_launch.cuh"
#include "kernels/gemm/join_epilogue.cuh"

namespace ikbo::gemm {

// Calls body(std::integral_constant<int, kernel>) for each of kJoinKernels.
template <class Body>
void for_each_join_kernel(const Body& body) {
  [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    (body(std::integral_constant<int, kJoinKernels[kIndices]>{}), ...);
  }(std::make_index_sequence<std::size(kJoinKernels)>{});
}

// D = act(A B^T + part + bias). join.preact is made here, from `preact` [M, N], contiguous, or
// null.
template <class T>
void run_join(const Operands& operands, const GemmProblem& problem, const GemmConfig& config,
              JoinParams join, void* preact, cudaStream_t stream) {
  join.has_preact = preact != nullptr;
  if (join.has_preact) {
    join.preact = make_tensor_map(preact, kElementType<T>, {problem.N, problem.M},
                                  {problem.N * static_cast<int64_t>(sizeof(T))},
                                  {kStoreTile, kStoreTile}, Swizzle::k128Bytes);
  }
  for_each_join_kernel([&]<int kKernel>(std::integral_constant<int, kKernel>) {
    if (config.kernel != kKernel) return;
    launch_kernel<T, kKernel, JoinEpilogue>(operands, problem, config, join, stream);
  });
}

template <class T>
void load_join() {
  for_each_join_kernel([&]<int kKernel>(std::integral_constant<int, kKernel>) {
    load_kernel(gemm_sm90<Shape<T, kKernel>, JoinEpilogue>);
  });
}

// Each type is compiled in a file of its own, instantiations/join_*.cu.
#define IKBO_JOIN_TEMPLATES(PREFIX, T)                                                     \
  PREFIX template void run_join<T>(const Operands&, const GemmProblem&, const GemmConfig&, \
                                   JoinParams, void*, cudaStream_t);                       \
  PREFIX template void load_join<T>();
IKBO_JOIN_TEMPLATES(extern, __half)
IKBO_JOIN_TEMPLATES(extern, __nv_bfloat16)

}  // namespace ikbo::gemm
