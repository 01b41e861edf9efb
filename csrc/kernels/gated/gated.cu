#include "kernels/gated/gated.h"
#include "kernels/gemm/gated_launch.cuh"
#include "kernels/gemm/join_launch.cuh"

namespace ikbo {
namespace {

// The joining GEMM with nothing to join.
template <class T>
void run(const LinearActParams& p, const LinearProblem& problem, const GemmConfig& config,
         cudaStream_t stream) {
  gemm::JoinParams join{};
  join.bias = p.w.bias;
  join.rows = static_cast<int32_t>(problem.M);
  join.columns = static_cast<int32_t>(problem.N);
  join.n_users = 1;
  join.activation = p.activation;
  const gemm::Operands operands{p.x,          p.w.data,        p.out, p.x_stride, p.w.row_stride,
                                p.out_stride, p.x_is_under_way};
  gemm::run_join<T>(operands, gated_model::linear_product(problem), config, join, p.preact, false,
                    stream);
}

template <class T>
void run(const GatedLinearParams& p, const LinearProblem& problem, const GemmConfig& config,
         cudaStream_t stream) {
  gemm::GatedParams gated{};
  gated.gate_bias = p.gate.bias;
  gated.up_bias = p.up.bias;
  gated.activation = p.activation;
  gated.starts_next = p.starts_next;
  const gemm::Operands operands{p.x,        p.gate.data,       p.out,
                                p.x_stride, p.gate.row_stride, p.out_stride};
  const gemm::GatedOperands more{p.up.data, p.up.row_stride, p.gate_preact, p.up_preact};
  gemm::run_gated<T>(operands, more, gated_model::gated_product(problem), config, gated, stream);
}

}  // namespace

void run_linear_act(const LinearActParams& params, const LinearProblem& problem,
                    const GemmConfig& config, cudaStream_t stream) {
  if (params.is_bfloat16) {
    run<__nv_bfloat16>(params, problem, config, stream);
  } else {
    run<__half>(params, problem, config, stream);
  }
}

void run_gated_linear(const GatedLinearParams& params, const LinearProblem& problem,
                      const GemmConfig& config, cudaStream_t stream) {
  if (params.is_bfloat16) {
    run<__nv_bfloat16>(params, problem, config, stream);
  } else {
    run<__half>(params, problem, config, stream);
  }
}

void load_gated() {
  gemm::load_gated<__half>();
  gemm::load_gated<__nv_bfloat16>();
}

}  // namespace ikbo
