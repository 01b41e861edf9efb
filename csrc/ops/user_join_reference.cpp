#include "ops/user_join_reference.h"

namespace ikbo {

Tensor preactivation_grad(const Tensor& grad_out, const Tensor& saved, const UserRows& rows,
                          Activation activation) {
  const ScalarType sums = accumulate_type(grad_out.scalar_type());
  Tensor grad = cast(grad_out, sums);
  if (activation != Activation::kNone) {
    grad = activation_backward(activation, grad, cast(saved, sums));
  }
  return fill_rows_without_user(grad, rows, 0, true);
}

Tensor sum_of_products(const Tensor& a, const Tensor& b, const UserRows* rows) {
  const int64_t m = a.size(1), n = b.size(2);
  const ScalarType sums = accumulate_type(a.scalar_type());
  Tensor total = zeros({m, n}, sums, a);
  for_each_slice(a, a.size(0), m * n * 4, [&](int64_t first, int64_t count) {
    Tensor right = narrow(b, 0, first, count);
    if (rows) right = fill_rows_without_user(right, *rows, first, true);
    total = add(total, sum_over(bmm_accumulate(narrow(a, 0, first, count), right), {0}));
  });
  return total;
}

}  // namespace ikbo
