// Host side of the linear compression kernels: tensor maps and launches.
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/linear_compression/linear_compression.h"
#include "kernels/linear_compression/linear_compression_sm90.cuh"
#include "launch/launch.h"

namespace ikbo::linear_compression {

// [rows, height, N] with the columns of a unit in a box.
template <class S>
CUtensorMap columns_map(ElementType type, const void* base, int64_t rows, int64_t height, int64_t N,
                        int64_t row_stride, int64_t stride, int64_t box_height) {
  constexpr int64_t kBytes = sizeof(typename S::T);
  return make_tensor_map(base, type, {N, height, rows}, {stride * kBytes, row_stride * kBytes},
                         {kUnitColumns, box_height, 1}, Swizzle::k128Bytes);
}

template <class S>
CUtensorMap weight_map(const LinearCompressionOperands& o,
                       const LinearCompressionProblem& problem) {
  constexpr int64_t kBytes = sizeof(typename S::T);
  return make_tensor_map(o.w, o.type, {problem.K, problem.M}, {o.w_stride * kBytes},
                         {kSwizzleK, S::kTileM}, Swizzle::k128Bytes);
}

template <class S>
CUtensorMap embedding_map(const LinearCompressionOperands& o,
                          const LinearCompressionProblem& problem) {
  return columns_map<S>(o.type, o.e, problem.rows, problem.K, problem.N, o.e_row_stride, o.e_stride,
                        S::kTileK);
}

template <class S>
Params make_params(const LinearCompressionOperands& o, const LinearCompressionProblem& problem,
                   const LinearCompressionConfig& config) {
  const auto result_map = [&](const void* base, int64_t rows) {
    return columns_map<S>(o.type, base, rows, problem.M, problem.N, problem.M * problem.N,
                          problem.N, S::kTileM);
  };
  Params params{};
  params.w = weight_map<S>(o, problem);
  params.e = embedding_map<S>(o, problem);
  params.out = result_map(o.out, problem.rows);
  // Without users every row is one without a user, and no part is read.
  if (o.n_users > 0) params.part = result_map(o.part, o.n_users);
  if (o.preact != nullptr) params.preact = result_map(o.preact, problem.rows);
  params.cand_to_user = o.cand_to_user;
  params.bias = o.bias;
  params.n_users = static_cast<int32_t>(o.n_users);
  params.M = static_cast<int32_t>(problem.M);
  params.m_tiles = FastDivisor(config.m_tiles);
  params.units_per_row = config.units_per_row;
  params.schedule = config.schedule;
  params.activation = o.activation;
  params.saves_preact = o.preact != nullptr;
  params.waits_at_start = !o.part_is_under_way;
  return params;
}

template <class S>
LaunchShape launch_shape(const LinearCompressionOperands& o,
                         const LinearCompressionConfig& config) {
  static_assert(sizeof(Shared<S>) + LinearCompressionKernel::kAlignmentBytes <=
                S::kConfig.shared_bytes());
  LaunchShape shape{static_cast<unsigned>(config.grid()), LinearCompressionKernel::kThreads};
  shape.shared_bytes = S::kConfig.shared_bytes();
  shape.overlaps_previous = true;
  return shape;
}

// Calls body(Shape<T, kKernel>) for each kernel of the table.
template <class T, class Body>
void for_each_kernel(Body body) {
  [&]<int... kKernels>(std::integer_sequence<int, kKernels...>) {
    (body.template operator()<Shape<T, kKernels>>(kKernels), ...);
  }(std::make_integer_sequence<int, kLinearCompressionKernelCount>{});
}

template <class T>
void run(const LinearCompressionOperands& operands, const LinearCompressionProblem& problem,
         const LinearCompressionConfig& config, cudaStream_t stream) {
  for_each_kernel<T>([&]<class S>(int kernel) {
    if (kernel != config.kernel) return;
    launch(linear_compression_sm90<S>, launch_shape<S>(operands, config), stream,
           make_params<S>(operands, problem, config));
  });
}

}  // namespace ikbo::linear_compression
