#include "ops/concat_linear_reference.h"

namespace ikbo {

Tensor concat_linear_user_part(const Tensor& x_user, const Tensor& w_user) {
  return mm_accumulate(x_user, transpose(w_user, 0, 1));
}

void concat_linear_reference(const Tensor& x_cand, const Tensor& w_cand, const Tensor& user_part,
                             const OptTensor& bias, const CandidateMap& map, Activation activation,
                             const Tensor& out, const OptTensor& preact) {
  const Tensor w = transpose(w_cand, 0, 1);
  const auto product = [&](int64_t first, int64_t count) {
    return mm_accumulate(narrow(x_cand, 0, first, count), w);
  };
  const bool save = preact && preact->numel() == out.numel();
  join_user_part_reference(user_part, bias, map, activation, product, out,
                           save ? preact : std::nullopt);
}

ConcatLinearGrads concat_linear_candidate_grads(const Tensor& grad_out, const Tensor& x_cand,
                                                const Tensor& w_cand, const Tensor& saved,
                                                const CandidateMap& map, Activation activation,
                                                bool want_x_cand, bool want_w_cand,
                                                bool want_bias) {
  const ScalarType dtype = x_cand.scalar_type();
  const UserRows rows = user_rows(map);
  ConcatLinearGrads grads{preactivation_grad(grad_out, saved, rows, activation),
                          nothing(dtype, x_cand), nothing(dtype, x_cand), nothing(dtype, x_cand)};
  const Tensor pre = as_operand(grads.preactivation, dtype);
  if (want_x_cand) {
    grads.x_cand = cast(fill_rows_without_user(mm_accumulate(pre, w_cand), rows, 0, true), dtype);
  }
  if (want_w_cand) {
    const Tensor x = fill_rows_without_user(x_cand, rows, 0, true);
    grads.w_cand = cast(mm_accumulate(transpose(pre, 0, 1), x), dtype);
  }
  if (want_bias) grads.bias = cast(sum_over(grads.preactivation, {0}), dtype);
  return grads;
}

}  // namespace ikbo
