#include "ops/linear_compression_reference.h"

namespace ikbo {

Tensor linear_compression_user_part(const Tensor& e_user, const Tensor& w_user) {
  const Tensor w = expand(w_user, {e_user.size(0), w_user.size(0), w_user.size(1)});
  return bmm_accumulate(w, e_user);
}

void linear_compression_reference(const Tensor& e_cand, const Tensor& w_cand,
                                  const Tensor& user_part, const OptTensor& bias,
                                  const CandidateMap& map, Activation activation, const Tensor& out,
                                  const OptTensor& preact) {
  const OptTensor column = bias ? OptTensor(torch::stable::unsqueeze(*bias, 1)) : std::nullopt;
  const auto product = [&](int64_t first, int64_t count) {
    return bmm_accumulate(expand(w_cand, {count, w_cand.size(0), w_cand.size(1)}),
                          narrow(e_cand, 0, first, count));
  };
  const bool save = preact && preact->numel() == out.numel();
  join_user_part_reference(user_part, column, map, activation, product, out,
                           save ? preact : std::nullopt);
}

LinearCompressionGrads linear_compression_candidate_grads(const Tensor& grad_out,
                                                          const Tensor& e_cand,
                                                          const Tensor& w_cand, const Tensor& saved,
                                                          const CandidateMap& map,
                                                          Activation activation, bool want_e_cand,
                                                          bool want_w_cand, bool want_bias) {
  const ScalarType dtype = e_cand.scalar_type();
  const UserRows rows = user_rows(map);
  LinearCompressionGrads grads{preactivation_grad(grad_out, saved, rows, activation),
                               nothing(dtype, e_cand), nothing(dtype, e_cand),
                               nothing(dtype, e_cand)};
  const Tensor pre = as_operand(grads.preactivation, dtype);
  if (want_e_cand) {
    grads.e_cand = empty(sizes_of(e_cand), dtype, e_cand);
    const Tensor w = transpose(w_cand, 0, 1);
    for_each_slice(e_cand, e_cand.size(0), e_cand.size(1) * e_cand.size(2) * 4,
                   [&](int64_t first, int64_t count) {
                     const Tensor grad = bmm_accumulate(expand(w, {count, w.size(0), w.size(1)}),
                                                        narrow(pre, 0, first, count));
                     copy_(narrow(grads.e_cand, 0, first, count),
                           fill_rows_without_user(grad, rows, first, true));
                   });
  }
  if (want_w_cand) {
    grads.w_cand = cast(sum_of_products(pre, transpose(e_cand, 1, 2), &rows), dtype);
  }
  if (want_bias) grads.bias = cast(sum_over(grads.preactivation, {0, 2}), dtype);
  return grads;
}

}  // namespace ikbo
