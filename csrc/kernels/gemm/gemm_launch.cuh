// Host side of the plain GEMM: tensor maps and the launch of one of kGemmKernels.
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/gemm/gemm_sm90.cuh"
#include "launch/launch.h"
#include "launch/tensor_map.h"

namespace ikbo::gemm {

// Row-major operands of D[M, N] = A[M, K] B[N, K]^T. Row strides in elements, multiples of 8; bases
// 16-byte aligned.
struct Operands {
  const void* a;
  const void* b;
  void* d;
  int64_t a_stride, b_stride, d_stride;
  Ahead ahead = Ahead::kAnything;
};

template <class T>
inline constexpr ElementType kElementType =
    std::is_same_v<T, __half> ? ElementType::kFloat16 : ElementType::kBfloat16;

// The map of an operand that is read in boxes of 64 columns.
template <class T>
CUtensorMap operand_map(const void* base, int64_t rows, int64_t columns, int64_t stride,
                        int64_t box_rows) {
  return make_tensor_map(base, kElementType<T>, {columns, rows},
                         {stride * static_cast<int64_t>(sizeof(T))}, {kTileK, box_rows},
                         Swizzle::k128Bytes);
}

// The map of B: [columns, K], or [K, columns] where that is how the epilogue's B lies.
template <class T, class S, class Epilogue>
CUtensorMap b_map(const void* base, int64_t columns, int64_t K, int64_t stride) {
  constexpr int kPart = kPartN<S, Epilogue>;
  if constexpr (Epilogue::kMajorB == hopper::Major::kMn) {
    return operand_map<T>(base, K, columns, stride, kPart);
  } else {
    return operand_map<T>(base, columns, K, stride, kPart);
  }
}

// With kWeights = 2 the problem's N counts the columns of both. The config's K is that of a term.
template <class T, int kKernel, class Epilogue>
void launch_kernel(const Operands& operands, const GemmProblem& problem, const GemmConfig& config,
                   const typename Epilogue::Params& epilogue, cudaStream_t stream) {
  using S = Shape<T, kKernel, Epilogue::kBuffers>;
  const int64_t columns = problem.N / Epilogue::kWeights;
  const Params params{
      operand_map<T>(operands.a, problem.M, problem.K, operands.a_stride, S::kTileM),
      b_map<T, S, Epilogue>(operands.b, columns, problem.K, operands.b_stride),
      operand_map<T>(operands.d, problem.M, columns, operands.d_stride, kStoreTile),
      config.order,
      config.k_steps,
      operands.ahead};
  LaunchShape shape{static_cast<unsigned>(config.grid), GemmKernel::kThreads};
  shape.shared_bytes = S::kConfig.shared_bytes();
  static_assert(sizeof(Shared<S, Epilogue>) + GemmKernel::kAlignmentBytes <=
                S::kConfig.shared_bytes());
  shape.cluster = S::kCluster;
  shape.overlaps_previous = true;
  launch(gemm_sm90<S, Epilogue>, shape, stream, params, epilogue);
}

// problem.batch is 1 and problem.K at least 1.
template <class T>
void run_gemm(const Operands& operands, const GemmProblem& problem, const GemmConfig& config,
              cudaStream_t stream) {
  const auto launch_if = [&]<int kKernel>(std::integral_constant<int, kKernel>) {
    if (config.kernel == kKernel) {
      launch_kernel<T, kKernel, PlainEpilogue>(operands, problem, config, {}, stream);
    }
  };
  [&]<int... kKernels>(std::integer_sequence<int, kKernels...>) {
    (launch_if(std::integral_constant<int, kKernels>{}), ...);
  }(std::make_integer_sequence<int, kGemmKernelCount>{});
}

}  // namespace ikbo::gemm
