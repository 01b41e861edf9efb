#include "kernels/gated/gated.h"
#include "kernels/gated/grad_sm90.cuh"
#include "kernels/gemm/grad_launch.cuh"
#include "launch/launch.h"

namespace ikbo {
namespace {

LaunchShape shape_of(int64_t count) {
  constexpr int64_t kElements = gated::kGradThreads * gated::kChunk;
  return {static_cast<unsigned>((count + kElements - 1) / kElements), gated::kGradThreads};
}

// body.template operator()<T>()
template <class Body>
void with_type(bool is_bfloat16, const Body& body) {
  if (is_bfloat16) {
    body.template operator()<__nv_bfloat16>();
  } else {
    body.template operator()<__half>();
  }
}

}  // namespace

void run_gated_grad(const GatedGradParams& p, const LinearProblem& problem,
                    const GatedGradConfig& config, cudaStream_t stream) {
  with_type(p.is_bfloat16, [&]<class T>() {
    if (!config.has_hidden) {
      const int64_t count = problem.M * problem.N;
      launch(gated::gated_grad_sm90<T>, shape_of(count), stream, p, count);
      return;
    }
    const gemm::Operands operands{p.grad,        p.w_down.data,       nullptr,
                                  p.grad_stride, p.w_down.row_stride, 0};
    gemm::run_gated_grad<T>(operands, {p.gate, p.up, p.grad_gate, p.grad_up, p.hidden},
                            gated_model::hidden_grad_product(problem, p.out_features),
                            config.hidden, p.activation, stream);
  });
}

void run_input_grad(const InputGradParams& p, const LinearProblem& problem,
                    const GatedGradConfig& config, cudaStream_t stream) {
  with_type(p.is_bfloat16, [&]<class T>() {
    const gemm::Operands operands{p.grad_gate, p.w_gate.data,       p.grad_x,
                                  problem.N,   p.w_gate.row_stride, p.grad_x_stride};
    gemm::run_input_grad<T>(operands, p.grad_up, problem.N, p.w_up.data, p.w_up.row_stride,
                            gated_model::input_grad_product(problem), config.input, stream);
  });
}

void run_linear_grad(const LinearGradParams& p, cudaStream_t stream) {
  with_type(p.is_bfloat16,
            [&]<class T>() { launch(gated::linear_grad_sm90<T>, shape_of(p.count), stream, p); });
}

void load_gated_grad() {
  const auto load_all = [&]<class T>() {
    load_kernel(gated::gated_grad_sm90<T>);
    load_kernel(gated::linear_grad_sm90<T>);
    gemm::load_grad<T>();
  };
  load_all.template operator()<__half>();
  load_all.template operator()<__nv_bfloat16>();
}

}  // namespace ikbo
