#include "ops/norm_reference.h"

namespace ikbo {
namespace {

Tensor as_rows(const Tensor& t, const NormProblem& p) {
  return reshape(t, {p.rows, p.groups, p.columns});
}
Tensor as_statistics(const Tensor& t, const NormProblem& p) {
  return reshape(t, {p.rows, p.groups, 1});
}

// Rows [first, first + count) to compute with. Contiguous: the order of ATen's sums follows
// strides.
Tensor take(const Tensor& rows, int64_t first, int64_t count, const NormProblem& p) {
  return torch::stable::contiguous(cast(narrow(rows, 0, first, count), p.sums));
}

// The sum over the last dimension, kept, in an order that depends on its length alone. ATen's own
// doesn't quite give that. On the CPU it splits a sum with a single result over the threads, so a
// lone row is summed as one of two. On CUDA the number of results decides how each is split, so
// there the additions are spelled out: halves are added until one column is left.
Tensor row_sum(Tensor t) {
  const Sizes sizes = sizes_of(t);
  if (t.is_cpu()) {
    if (sizes[0] * sizes[1] != 1) return sum_over(t, {2}, true);
    return narrow(sum_over(expand(t, {2, 1, sizes[2]}), {2}, true), 0, 0, 1);
  }
  if (sizes[2] == 0) return zeros({sizes[0], sizes[1], 1}, t.scalar_type(), t);
  OptTensor odd;
  for (int64_t n = sizes[2]; n > 1; n /= 2) {
    if (n % 2 == 1) {
      const Tensor last = narrow(t, 2, n - 1, 1);
      odd = odd ? add(*odd, last) : last;
    }
    t = add(narrow(t, 2, 0, n / 2), narrow(t, 2, n / 2, n / 2));
  }
  return odd ? add(t, *odd) : t;
}

Tensor row_mean(const Tensor& t) {
  const Tensor length = scalar(static_cast<double>(t.size(2)), t.scalar_type(), t);
  return aten("aten::div", "Tensor", row_sum(t), length);
}

// weight + weight_offset as [groups, columns].
OptTensor shifted_weight(const OptTensor& weight, const NormProblem& p) {
  if (!weight) return std::nullopt;
  const Tensor w = cast(reshape(*weight, {p.groups, p.columns}), p.sums);
  return p.weight_offset == 0.0 ? w : add(w, scalar(p.weight_offset, p.sums, w));
}

// Slices leave room for the few temporaries of a row's arithmetic.
int64_t row_bytes(const NormProblem& p) {
  return 4 * p.groups * p.columns * (p.sums == ScalarType::Double ? 8 : 4);
}

}  // namespace

void norm_rows_reference(const NormProblem& p, const NormInputs& in, const NormOutputs& out,
                         const StoreRows& store) {
  const auto rows_of = [&](const Tensor& t) { return OptTensor(as_rows(t, p)); };
  const auto statistics_of = [&](const OptTensor& t) {
    return t ? OptTensor(as_statistics(*t, p)) : std::nullopt;
  };
  const Tensor x_rows = as_rows(in.x, p);
  const OptTensor residual = in.residual ? rows_of(*in.residual) : std::nullopt;
  const OptTensor residual_out = out.residual_out ? rows_of(*out.residual_out) : std::nullopt;
  const OptTensor mean_out = statistics_of(out.mean), rstd_out = statistics_of(out.rstd);
  const OptTensor weight = shifted_weight(in.weight, p);
  const OptTensor bias =
      in.bias ? OptTensor(cast(reshape(*in.bias, {p.groups, p.columns}), p.sums)) : std::nullopt;
  const Tensor eps = scalar(p.eps, p.sums, in.x);
  for_each_slice(in.x, p.rows, row_bytes(p), [&](int64_t first, int64_t count) {
    Tensor x = take(x_rows, first, count, p);
    if (residual) x = add(x, take(*residual, first, count, p));
    if (residual_out) copy_(narrow(*residual_out, 0, first, count), x);
    if (p.kind == NormKind::kLayer) {
      const Tensor mean = row_mean(x);
      if (mean_out) copy_(narrow(*mean_out, 0, first, count), mean);
      x = sub(x, mean);
    }
    const Tensor rstd = aten("aten::rsqrt", "", add(row_mean(mul(x, x)), eps));
    if (rstd_out) copy_(narrow(*rstd_out, 0, first, count), rstd);
    Tensor y = mul(x, rstd);
    if (weight) y = mul(y, *weight);
    if (bias) y = add(y, *bias);
    store(first, count, y);
  });
}

void norm_reference(const NormProblem& p, const NormInputs& in, const Tensor& y,
                    const NormOutputs& out) {
  if (y.numel() == 0 && (!out.rstd || out.rstd->numel() == 0)) return;
  const Tensor y_rows = as_rows(y, p);
  norm_rows_reference(p, in, out, [&](int64_t first, int64_t count, const Tensor& rows) {
    copy_(narrow(y_rows, 0, first, count), rows);
  });
}

void norm_backward_reference(const NormProblem& p, const NormBackwardInputs& in,
                             const NormGrads& grads) {
  const auto rows_of = [&](const OptTensor& t) {
    return t ? OptTensor(as_rows(*t, p)) : std::nullopt;
  };
  const Tensor x_rows = as_rows(in.x, p), grad_rows = as_rows(in.grad_y, p);
  const Tensor rstds = as_statistics(in.rstd, p);
  const OptTensor means = in.mean ? OptTensor(as_statistics(*in.mean, p)) : std::nullopt;
  const OptTensor grad_residual_out = rows_of(in.grad_residual_out);
  const OptTensor x_out = rows_of(grads.x), residual_grad_out = rows_of(grads.residual);
  const OptTensor weight = shifted_weight(in.weight, p);
  Tensor weight_sum = zeros({p.groups, p.columns}, p.sums, in.x), bias_sum = weight_sum;
  for_each_slice(in.x, p.rows, row_bytes(p), [&](int64_t first, int64_t count) {
    const Tensor grad_y = take(grad_rows, first, count, p);
    if (grads.bias) bias_sum = add(bias_sum, sum_over(grad_y, {0}));
    if (!x_out && !residual_grad_out && !grads.weight) return;
    const Tensor rstd = narrow(rstds, 0, first, count);
    Tensor x_hat = take(x_rows, first, count, p);
    if (means) x_hat = sub(x_hat, narrow(*means, 0, first, count));
    x_hat = mul(x_hat, rstd);
    if (grads.weight) weight_sum = add(weight_sum, sum_over(mul(grad_y, x_hat), {0}));
    if (!x_out && !residual_grad_out) return;
    const Tensor grad = weight ? mul(grad_y, *weight) : grad_y;
    Tensor grad_x = sub(grad, mul(x_hat, row_mean(mul(grad, x_hat))));
    if (means) grad_x = sub(grad_x, row_mean(grad));
    grad_x = mul(grad_x, rstd);
    if (grad_residual_out) grad_x = add(grad_x, take(*grad_residual_out, first, count, p));
    if (x_out) copy_(narrow(*x_out, 0, first, count), grad_x);
    if (residual_grad_out) copy_(narrow(*residual_grad_out, 0, first, count), grad_x);
  });
  if (grads.weight) copy_(*grads.weight, reshape(weight_sum, sizes_of(*grads.weight)));
  if (grads.bias) copy_(*grads.bias, reshape(bias_sum, sizes_of(*grads.bias)));
}

}  // namespace ikbo
