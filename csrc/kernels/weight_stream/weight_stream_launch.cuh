// Host side of the products of few tokens: tensor maps and the launch of one of the kernels.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>
#include <utility>

#include "kernels/weight_stream/weight_stream_sm90.cuh"
#include "launch/launch.h"
#include "launch/tensor_map.h"

namespace ikbo::weight_stream {

// Row-major 16-bit matrices. Row strides in elements, multiples of 8; bases 16-byte aligned.
struct Weight {
  const void* data;  // [N, K]
  int64_t stride;
  const void* bias;  // [N], 16-byte aligned; or null
  void* preact;      // [M, N] contiguous; or null
};
struct Operands {
  const void* x;  // [M, K]
  int64_t x_stride;
  Weight w[2];  // the second only with two weights
  void* out;    // [M, N]
  int64_t out_stride;
  Activation activation;
  bool x_is_under_way;  // the kernel ahead on the stream computes x, and nothing else of these
};

template <class S>
void launch_kernel(const Operands& operands, const WeightStreamProblem& problem,
                   const WeightStreamConfig& config, cudaStream_t stream) {
  using K = WeightStreamKernel;
  constexpr ElementType kType =
      std::is_same_v<typename S::T, __half> ? ElementType::kFloat16 : ElementType::kBfloat16;
  const auto map = [&](const void* base, int64_t rows, int64_t stride, int64_t box_rows) {
    return make_tensor_map(base, kType, {problem.K, rows}, {stride * K::kElementBytes},
                           {kBoxK, box_rows}, Swizzle::k128Bytes);
  };
  const int64_t token_rows = weight_stream_model::token_rows(problem);
  Params params{};
  for (int i = 0; i < S::kWeights; ++i) {
    params.w[i] = map(operands.w[i].data, problem.N, operands.w[i].stride, config.features);
    params.bias[i] = operands.w[i].bias;
    params.preact[i] = operands.w[i].preact;
  }
  params.x = map(operands.x, problem.M, operands.x_stride, token_rows);
  params.out = operands.out;
  params.out_stride = operands.out_stride;
  params.M = static_cast<int32_t>(problem.M);
  params.N = static_cast<int32_t>(problem.N);
  params.features = config.features;
  params.token_tiles = FastDivisor(config.token_tiles);
  params.k_steps = config.k_steps;
  params.split = config.split;
  params.split_log2 = std::countr_zero(static_cast<unsigned>(config.split));
  const int64_t quads = weight_stream_model::ceil_div(config.features / 4, config.split);
  params.quads_log2 = std::bit_width(static_cast<unsigned>(quads - 1));
  params.load_bytes = static_cast<uint32_t>((config.features * S::kWeights + token_rows) *
                                            S::kTileK * K::kElementBytes);
  params.weight_hint = config.weights_stay ? hopper::L2Hint::kNormal : hopper::L2Hint::kEvictFirst;
  params.activation = operands.activation;
  params.x_is_under_way = operands.x_is_under_way;
  static_assert(sizeof(Shared<S>) + K::kAlignmentBytes <= K::kSharedBytes);
  LaunchShape shape{static_cast<unsigned>(config.ctas()), kThreads, K::kSharedBytes};
  shape.cluster = config.split;
  shape.overlaps_previous = true;
  // Two CTAs an SM take all of its shared memory, which the driver otherwise sizes for one.
  IKBO_CUDA_CHECK(cudaFuncSetAttribute(weight_stream_sm90<S>,
                                       cudaFuncAttributePreferredSharedMemoryCarveout,
                                       cudaSharedmemCarveoutMaxShared));
  launch(weight_stream_sm90<S>, shape, stream, params);
}

// Calls body.template operator()<Shape>() for each kernel of the type.
template <class T, class Body>
void for_each_kernel(const Body& body) {
  constexpr auto kTokens = kWeightStreamTokens;
  [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    (body.template operator()<Shape<T, kTokens[kIndices], 1>>(), ...);
    (body.template operator()<Shape<T, kTokens[kIndices], 2>>(), ...);
  }(std::make_index_sequence<std::size(kWeightStreamTokens)>{});
}

// For a config of the problem.
template <class T>
void run_weight_stream(const Operands& operands, const WeightStreamProblem& problem,
                       const WeightStreamConfig& config, cudaStream_t stream) {
  for_each_kernel<T>([&]<class S>() {
    if (S::kTokens != config.tokens || S::kWeights != config.weights) return;
    launch_kernel<S>(operands, problem, config, stream);
  });
}

template <class T>
void load_weight_stream() {
  for_each_kernel<T>([&]<class S>() { load_kernel(weight_stream_sm90<S>); });
}

// Each type is compiled in a file of its own, instantiations/*.cu.
#define IKBO_WEIGHT_STREAM_TEMPLATES(PREFIX, T)                                          \
  PREFIX template void run_weight_stream<T>(const Operands&, const WeightStreamProblem&, \
                                            const WeightStreamConfig&, cudaStream_t);    \
  PREFIX template void load_weight_stream<T>();
IKBO_WEIGHT_STREAM_TEMPLATES(extern, __half)
IKBO_WEIGHT_STREAM_TEMPLATES(extern, __nv_bfloat16)

}  // namespace ikbo::weight_stream
