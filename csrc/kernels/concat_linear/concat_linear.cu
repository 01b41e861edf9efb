#include "kernels/concat_linear/concat_linear.h"
#include "kernels/concat_linear/few_rows_sm90.cuh"
#include "kernels/gemm/join_launch.cuh"
#include "launch/launch.h"

namespace ikbo {
namespace {

// The users' product. That of few rows lets the next kernel start at once; itself it starts after
// all that is ahead of it on the stream.
template <class T>
void run_user_product(const ConcatLinearParams& p, const ConcatLinearProblem& problem,
                      const ConcatLinearConfig& config, cudaStream_t stream) {
  const GemmProblem product = concat_linear_model::users_product(problem);
  if (config.user_product == UserProduct::kFewRows) {
    const concat_linear::FewRowsParams<T> params{
        static_cast<const T*>(p.x_user.data),
        static_cast<const T*>(p.w_user.data),
        static_cast<T*>(p.product),
        p.x_user.row_stride,
        p.w_user.row_stride,
        problem.N,
        static_cast<int32_t>(product.M),
        static_cast<int32_t>(product.N),
        static_cast<int32_t>(product.K),
        static_cast<int32_t>(gemm_model::ceil_div(product.N, FewRowsKernel::kColumns))};
    launch(concat_linear::few_rows_sm90<T>,
           {static_cast<unsigned>(FewRowsKernel::ctas(product)), FewRowsKernel::kThreads}, stream,
           params);
    return;
  }
  gemm::JoinParams join{};
  join.rows = static_cast<int32_t>(problem.U);
  join.columns = static_cast<int32_t>(problem.N);
  join.n_users = 1;
  const gemm::Operands operands{p.x_user.data,       p.w_user.data,       p.product,
                                p.x_user.row_stride, p.w_user.row_stride, problem.N};
  gemm::run_join<T>(operands, product, config.users, join, nullptr, stream);
}

template <class T>
void run(const ConcatLinearParams& p, const ConcatLinearProblem& problem,
         const ConcatLinearConfig& config, cudaStream_t stream) {
  if (config.waits_for_users()) run_user_product<T>(p, problem, config, stream);
  gemm::JoinParams join{};
  join.cand_to_user = p.cand_to_user;
  join.part = p.part.data;
  join.part_stride = p.part.row_stride;
  join.part_is_float = p.part_is_float;
  join.bias = p.bias;
  join.rows = static_cast<int32_t>(problem.B);
  join.columns = static_cast<int32_t>(problem.N);
  join.n_users = static_cast<int32_t>(problem.U);
  join.activation = p.activation;
  const gemm::Operands operands{
      p.x_cand.data,
      p.w_cand.data,
      p.out,
      p.x_cand.row_stride,
      p.w_cand.row_stride,
      p.out_stride,
      config.waits_for_users() ? gemm::Ahead::kPart : gemm::Ahead::kAnything};
  gemm::run_join<T>(operands, concat_linear_model::candidates_product(problem), config.candidates,
                    join, p.preact, stream);
}

}  // namespace

void run_concat_linear(const ConcatLinearParams& params, const ConcatLinearProblem& problem,
                       const ConcatLinearConfig& config, cudaStream_t stream) {
  if (params.is_bfloat16) {
    run<__nv_bfloat16>(params, problem, config, stream);
  } else {
    run<__half>(params, problem, config, stream);
  }
}

void load_concat_linear() {
  gemm::load_join<__half>();
  gemm::load_join<__nv_bfloat16>();
  load_kernel(concat_linear::few_rows_sm90<__half>);
  load_kernel(concat_linear::few_rows_sm90<__nv_bfloat16>);
}

}  // namespace ikbo
