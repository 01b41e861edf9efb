#include "kernels/gated/gated.h"
#include "kernels/gated/narrow_sm90.cuh"
#include "kernels/gemm/gated_launch.cuh"
#include "kernels/gemm/join_launch.cuh"
#include "kernels/weight_stream/weight_stream_launch.cuh"

namespace ikbo {
namespace {

// The joining GEMM with nothing to join.
template <class T>
void run_gemm(const LinearActParams& p, const LinearProblem& problem, const GemmConfig& config,
              cudaStream_t stream) {
  gemm::JoinParams join{};
  join.bias = p.w.bias;
  join.rows = static_cast<int32_t>(problem.M);
  join.columns = static_cast<int32_t>(problem.N);
  join.n_users = 1;
  join.activation = p.activation;
  const gemm::Operands operands{p.x,
                                p.w.data,
                                p.out,
                                p.x_stride,
                                p.w.row_stride,
                                p.out_stride,
                                p.x_is_under_way ? gemm::Ahead::kA : gemm::Ahead::kAnything};
  gemm::run_join<T>(operands, gated_model::linear_product(problem), config, join, p.preact, stream);
}

template <class T>
void run_stream(const LinearActParams& p, const LinearProblem& problem,
                const WeightStreamConfig& config, cudaStream_t stream) {
  const weight_stream::Operands operands{p.x,
                                         p.x_stride,
                                         {{p.w.data, p.w.row_stride, p.w.bias, p.preact}},
                                         p.out,
                                         p.out_stride,
                                         p.activation,
                                         p.x_is_under_way};
  weight_stream::run_weight_stream<T>(operands, gated_model::stream_problem(problem, 1), config,
                                      stream);
}

template <class T>
void run_narrow(const LinearActParams& p, const LinearProblem& problem, cudaStream_t stream) {
  const gated::NarrowParams params{p.x,
                                   p.w.data,
                                   p.w.bias,
                                   p.out,
                                   p.preact,
                                   p.x_stride,
                                   p.w.row_stride,
                                   p.out_stride,
                                   problem.M,
                                   static_cast<int32_t>(problem.N),
                                   static_cast<int32_t>(problem.K),
                                   p.activation};
  const int64_t ctas = gemm_model::ceil_div(problem.M, gated::kRowsACta);
  LaunchShape shape{static_cast<unsigned>(ctas), gated::kNarrowThreads};
  shape.overlaps_previous = true;
  launch(gated::narrow_sm90<T>, shape, stream, params);
}

template <class T>
void run_gemm(const GatedLinearParams& p, const LinearProblem& problem, const GemmConfig& config,
              cudaStream_t stream) {
  gemm::GatedParams gated{};
  gated.gate_bias = p.gate.bias;
  gated.up_bias = p.up.bias;
  gated.activation = p.activation;
  const gemm::Operands operands{p.x,        p.gate.data,       p.out,
                                p.x_stride, p.gate.row_stride, p.out_stride};
  const gemm::GatedOperands more{p.up.data, p.up.row_stride, p.gate_preact, p.up_preact};
  gemm::run_gated<T>(operands, more, gated_model::gated_product(problem), config, gated, stream);
}

template <class T>
void run_stream(const GatedLinearParams& p, const LinearProblem& problem,
                const WeightStreamConfig& config, cudaStream_t stream) {
  const weight_stream::Operands operands{
      p.x,
      p.x_stride,
      {{p.gate.data, p.gate.row_stride, p.gate.bias, p.gate_preact},
       {p.up.data, p.up.row_stride, p.up.bias, p.up_preact}},
      p.out,
      p.out_stride,
      p.activation,
      false};
  weight_stream::run_weight_stream<T>(operands, gated_model::stream_problem(problem, 2), config,
                                      stream);
}

template <class Params>
void run(const Params& params, const LinearProblem& problem, const ProductConfig& config,
         cudaStream_t stream) {
  const auto run_as = [&]<class T>() {
    if (config.kernel == ProductKernel::kGemm) {
      run_gemm<T>(params, problem, config.gemm, stream);
    } else if (config.kernel == ProductKernel::kWeightStream) {
      run_stream<T>(params, problem, config.stream, stream);
    } else if constexpr (std::is_same_v<Params, LinearActParams>) {
      run_narrow<T>(params, problem, stream);
    }
  };
  if (params.is_bfloat16) {
    run_as.template operator()<__nv_bfloat16>();
  } else {
    run_as.template operator()<__half>();
  }
}

}  // namespace

void run_linear_act(const LinearActParams& params, const LinearProblem& problem,
                    const ProductConfig& config, cudaStream_t stream) {
  run(params, problem, config, stream);
}

void run_gated_linear(const GatedLinearParams& params, const LinearProblem& problem,
                      const ProductConfig& config, cudaStream_t stream) {
  run(params, problem, config, stream);
}

void load_gated() {
  gemm::load_gated<__half>();
  gemm::load_gated<__nv_bfloat16>();
  weight_stream::load_weight_stream<__half>();
  weight_stream::load_weight_stream<__nv_bfloat16>();
  load_kernel(gated::narrow_sm90<__half>);
  load_kernel(gated::narrow_sm90<__nv_bfloat16>);
  load_gated_grad();
}

}  // namespace ikbo
