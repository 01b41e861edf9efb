#include "ops/norm_kernels.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace ikbo {
namespace {

Tensor allocate_y(const char* op, const NormProblem& p, const Tensor& x, OptDtype out_dtype) {
  return empty(p.sizes, result_dtype(op, "out_dtype", out_dtype, x.scalar_type()), x);
}

void check_statistics(const char* op, const char* name, const Tensor& t, const NormProblem& p,
                      const Tensor& x) {
  IKBO_CHECK(sizes_of(t) == p.leading, op, "expected ", name,
             " in the shape of x without its normalised dimensions, got ", shape_text(t), " for x ",
             shape_text(x), ". Pass the one NAME_fwd returned.");
  IKBO_CHECK(t.scalar_type() == p.sums, op, "expected ", name, " in ", dtype_text(p.sums), ", got ",
             dtype_text(t.scalar_type()), ". Pass the one NAME_fwd returned.");
  check_same_device(op, name, t, "x", x);
}

void check_grad(const char* op, const char* name, const Tensor& grad, const NormProblem& p,
                const Tensor& x) {
  IKBO_CHECK(sizes_of(grad) == p.sizes, op, "expected ", name, " in the shape of x ", shape_text(x),
             ", got ", shape_text(grad), ".");
  check_floating(op, name, grad);
  check_same_device(op, name, grad, "x", x);
}

void forward(OpPaths& paths, const NormProblem& p, const NormInputs& in, const Tensor& y,
             const NormOutputs& out) {
  if (!norm_forward_kernel(paths, p, in, y, out)) norm_reference(p, in, y, out);
}

void forward_into(OpPaths& paths, const NormProblem& p, const NormInputs& in, const Tensor& out) {
  if (norm_forward_kernel(paths, p, in, out, {})) return;
  const Tensor y = out.is_contiguous() ? out : empty(p.sizes, out.scalar_type(), out);
  norm_reference(p, in, y, {});
  if (!out.is_contiguous()) copy_(out, y);
}

OptTensor grad_if(bool wanted, const OptTensor& like) {
  if (!wanted || !like) return std::nullopt;
  return empty(sizes_of(*like), like->scalar_type(), *like);
}

// A gradient as _bwd returns it: in the type of what it belongs to, of size 0 where not wanted.
Tensor result(const OptTensor& grad, const OptTensor& like, const Tensor& x) {
  return grad ? *grad : nothing((like ? *like : x).scalar_type(), x);
}

void backward(OpPaths& paths, const NormProblem& p, const NormBackwardInputs& in,
              const NormGrads& grads) {
  if (!norm_backward_kernel(paths, p, in, grads)) norm_backward_reference(p, in, grads);
}

Tensors3 backward(const char* op, OpPaths& paths, const NormProblem& p, const Tensor& grad_y,
                  const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                  const Tensor* mean, const Tensor& rstd, int64_t grad_mask) {
  check_grad(op, "grad_y", grad_y, p, x);
  if (mean) check_statistics(op, "mean", *mean, p, x);
  check_statistics(op, "rstd", rstd, p, x);
  const NormGrads grads{grad_if(wants(grad_mask, 0), x), std::nullopt,
                        grad_if(wants(grad_mask, 1), weight), grad_if(wants(grad_mask, 2), bias)};
  backward(paths, p, {grad_y, std::nullopt, x, weight, mean, rstd}, grads);
  return {result(grads.x, x, x), result(grads.weight, weight, x), result(grads.bias, bias, x)};
}

// residual_out stands for x in the checks: it is what was normalised.
Tensors4 add_backward(const char* op, OpPaths& paths, NormProblem p, const Tensor& grad_y,
                      const OptTensor& grad_residual_out, const Tensor& residual_out,
                      const OptTensor& weight, const OptTensor& bias, const Tensor* mean,
                      const Tensor& rstd, ScalarType x_dtype, ScalarType residual_dtype,
                      int64_t grad_mask) {
  result_dtype(op, "x_dtype", x_dtype, x_dtype);
  result_dtype(op, "residual_dtype", residual_dtype, residual_dtype);
  const bool wide = x_dtype == ScalarType::Double || residual_dtype == ScalarType::Double;
  p.sums = wide ? ScalarType::Double : ScalarType::Float;
  check_grad(op, "grad_y", grad_y, p, residual_out);
  if (grad_residual_out) {
    check_grad(op, "grad_residual_out", *grad_residual_out, p, residual_out);
  }
  if (mean) check_statistics(op, "mean", *mean, p, residual_out);
  check_statistics(op, "rstd", rstd, p, residual_out);
  NormGrads grads{std::nullopt, std::nullopt, grad_if(wants(grad_mask, 2), weight),
                  grad_if(wants(grad_mask, 3), bias)};
  if (wants(grad_mask, 0)) grads.x = empty(p.sizes, x_dtype, residual_out);
  if (wants(grad_mask, 1) && residual_dtype != x_dtype) {
    grads.residual = empty(p.sizes, residual_dtype, residual_out);
  }
  backward(paths, p, {grad_y, grad_residual_out, residual_out, weight, mean, rstd}, grads);
  return {grads.x ? *grads.x : nothing(x_dtype, residual_out),
          grads.residual ? *grads.residual : nothing(residual_dtype, residual_out),
          result(grads.weight, weight, residual_out), result(grads.bias, bias, residual_out)};
}

}  // namespace

Tensor rms_norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                double weight_offset, OptDtype out_dtype, int64_t normalized_ndim) {
  constexpr const char* op = "rms_norm";
  const NormInputs in{x, nullptr, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kRms, in, eps, weight_offset, normalized_ndim);
  const Tensor y = allocate_y(op, p, x, out_dtype);
  static OpPaths paths(op);
  forward(paths, p, in, y, {});
  return y;
}

void rms_norm_out(const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                  double weight_offset, OptDtype out_dtype, int64_t normalized_ndim,
                  const Tensor& out) {
  constexpr const char* op = "rms_norm";
  const NormInputs in{x, nullptr, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kRms, in, eps, weight_offset, normalized_ndim);
  check_out(op, out, p.sizes, result_dtype(op, "out_dtype", out_dtype, x.scalar_type()), x);
  static OpPaths paths(op);
  forward_into(paths, p, in, out);
}

Tensors2 rms_norm_fwd(const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                      double weight_offset, OptDtype out_dtype, int64_t normalized_ndim) {
  constexpr const char* op = "rms_norm_fwd";
  const NormInputs in{x, nullptr, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kRms, in, eps, weight_offset, normalized_ndim);
  const Tensor y = allocate_y(op, p, x, out_dtype), rstd = allocate_statistics(p, x);
  static OpPaths paths(op);
  forward(paths, p, in, y, {.rstd = rstd});
  return {y, rstd};
}

Tensors3 rms_norm_bwd(const Tensor& grad_y, const Tensor& x, const OptTensor& weight,
                      const OptTensor& bias, const Tensor& rstd, double weight_offset,
                      int64_t normalized_ndim, int64_t grad_mask) {
  constexpr const char* op = "rms_norm_bwd";
  const NormProblem p = check_norm(op, NormKind::kRms, {x, nullptr, weight, bias}, 0.0,
                                   weight_offset, normalized_ndim);
  static OpPaths paths(op);
  return backward(op, paths, p, grad_y, x, weight, bias, nullptr, rstd, grad_mask);
}

Tensor layer_norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                  double weight_offset, OptDtype out_dtype, int64_t normalized_ndim) {
  constexpr const char* op = "layer_norm";
  const NormInputs in{x, nullptr, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kLayer, in, eps, weight_offset, normalized_ndim);
  const Tensor y = allocate_y(op, p, x, out_dtype);
  static OpPaths paths(op);
  forward(paths, p, in, y, {});
  return y;
}

void layer_norm_out(const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                    double weight_offset, OptDtype out_dtype, int64_t normalized_ndim,
                    const Tensor& out) {
  constexpr const char* op = "layer_norm";
  const NormInputs in{x, nullptr, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kLayer, in, eps, weight_offset, normalized_ndim);
  check_out(op, out, p.sizes, result_dtype(op, "out_dtype", out_dtype, x.scalar_type()), x);
  static OpPaths paths(op);
  forward_into(paths, p, in, out);
}

Tensors3 layer_norm_fwd(const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                        double weight_offset, OptDtype out_dtype, int64_t normalized_ndim) {
  constexpr const char* op = "layer_norm_fwd";
  const NormInputs in{x, nullptr, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kLayer, in, eps, weight_offset, normalized_ndim);
  const Tensor y = allocate_y(op, p, x, out_dtype);
  const Tensor mean = allocate_statistics(p, x), rstd = allocate_statistics(p, x);
  static OpPaths paths(op);
  forward(paths, p, in, y, {.mean = mean, .rstd = rstd});
  return {y, mean, rstd};
}

Tensors3 layer_norm_bwd(const Tensor& grad_y, const Tensor& x, const OptTensor& weight,
                        const OptTensor& bias, const Tensor& mean, const Tensor& rstd,
                        double weight_offset, int64_t normalized_ndim, int64_t grad_mask) {
  constexpr const char* op = "layer_norm_bwd";
  const NormProblem p = check_norm(op, NormKind::kLayer, {x, nullptr, weight, bias}, 0.0,
                                   weight_offset, normalized_ndim);
  static OpPaths paths(op);
  return backward(op, paths, p, grad_y, x, weight, bias, &mean, rstd, grad_mask);
}

Tensors2 add_rms_norm(const Tensor& x, const Tensor& residual, const OptTensor& weight,
                      const OptTensor& bias, double eps, double weight_offset, OptDtype out_dtype,
                      OptDtype residual_dtype, int64_t normalized_ndim) {
  constexpr const char* op = "add_rms_norm";
  const NormInputs in{x, &residual, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kRms, in, eps, weight_offset, normalized_ndim);
  const Tensor y = allocate_y(op, p, x, out_dtype);
  const Tensor residual_out = allocate_residual_out(op, p, residual, residual_dtype);
  static OpPaths paths(op);
  forward(paths, p, in, y, {.residual_out = residual_out});
  return {y, residual_out};
}

Tensors3 add_rms_norm_fwd(const Tensor& x, const Tensor& residual, const OptTensor& weight,
                          const OptTensor& bias, double eps, double weight_offset,
                          OptDtype out_dtype, OptDtype residual_dtype, int64_t normalized_ndim) {
  constexpr const char* op = "add_rms_norm_fwd";
  const NormInputs in{x, &residual, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kRms, in, eps, weight_offset, normalized_ndim);
  const Tensor y = allocate_y(op, p, x, out_dtype), rstd = allocate_statistics(p, x);
  const Tensor residual_out = allocate_residual_out(op, p, residual, residual_dtype);
  static OpPaths paths(op);
  forward(paths, p, in, y, {.residual_out = residual_out, .rstd = rstd});
  return {y, residual_out, rstd};
}

Tensors4 add_rms_norm_bwd(const Tensor& grad_y, const OptTensor& grad_residual_out,
                          const Tensor& residual_out, const OptTensor& weight,
                          const OptTensor& bias, const Tensor& rstd, double weight_offset,
                          ScalarType x_dtype, ScalarType residual_dtype, int64_t normalized_ndim,
                          int64_t grad_mask) {
  constexpr const char* op = "add_rms_norm_bwd";
  const NormProblem p = check_norm(op, NormKind::kRms, {residual_out, nullptr, weight, bias}, 0.0,
                                   weight_offset, normalized_ndim);
  static OpPaths paths(op);
  return add_backward(op, paths, p, grad_y, grad_residual_out, residual_out, weight, bias, nullptr,
                      rstd, x_dtype, residual_dtype, grad_mask);
}

Tensors2 add_layer_norm(const Tensor& x, const Tensor& residual, const OptTensor& weight,
                        const OptTensor& bias, double eps, double weight_offset, OptDtype out_dtype,
                        OptDtype residual_dtype, int64_t normalized_ndim) {
  constexpr const char* op = "add_layer_norm";
  const NormInputs in{x, &residual, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kLayer, in, eps, weight_offset, normalized_ndim);
  const Tensor y = allocate_y(op, p, x, out_dtype);
  const Tensor residual_out = allocate_residual_out(op, p, residual, residual_dtype);
  static OpPaths paths(op);
  forward(paths, p, in, y, {.residual_out = residual_out});
  return {y, residual_out};
}

Tensors4 add_layer_norm_fwd(const Tensor& x, const Tensor& residual, const OptTensor& weight,
                            const OptTensor& bias, double eps, double weight_offset,
                            OptDtype out_dtype, OptDtype residual_dtype, int64_t normalized_ndim) {
  constexpr const char* op = "add_layer_norm_fwd";
  const NormInputs in{x, &residual, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kLayer, in, eps, weight_offset, normalized_ndim);
  const Tensor y = allocate_y(op, p, x, out_dtype);
  const Tensor residual_out = allocate_residual_out(op, p, residual, residual_dtype);
  const Tensor mean = allocate_statistics(p, x), rstd = allocate_statistics(p, x);
  static OpPaths paths(op);
  forward(paths, p, in, y, {residual_out, mean, rstd});
  return {y, residual_out, mean, rstd};
}

Tensors4 add_layer_norm_bwd(const Tensor& grad_y, const OptTensor& grad_residual_out,
                            const Tensor& residual_out, const OptTensor& weight,
                            const OptTensor& bias, const Tensor& mean, const Tensor& rstd,
                            double weight_offset, ScalarType x_dtype, ScalarType residual_dtype,
                            int64_t normalized_ndim, int64_t grad_mask) {
  constexpr const char* op = "add_layer_norm_bwd";
  const NormProblem p = check_norm(op, NormKind::kLayer, {residual_out, nullptr, weight, bias}, 0.0,
                                   weight_offset, normalized_ndim);
  static OpPaths paths(op);
  return add_backward(op, paths, p, grad_y, grad_residual_out, residual_out, weight, bias, &mean,
                      rstd, x_dtype, residual_dtype, grad_mask);
}

Tensor head_norm(const Tensor& x, const Tensor& weight, double eps, double weight_offset) {
  constexpr const char* op = "head_norm";
  const OptTensor w = weight, no_bias;
  const NormInputs in{x, nullptr, w, no_bias};
  const NormProblem p = check_head_norm(op, in, eps, weight_offset);
  const Tensor y = allocate_y(op, p, x, std::nullopt);
  static OpPaths paths(op);
  forward(paths, p, in, y, {});
  return y;
}

Tensors2 head_norm_fwd(const Tensor& x, const Tensor& weight, double eps, double weight_offset) {
  constexpr const char* op = "head_norm_fwd";
  const OptTensor w = weight, no_bias;
  const NormInputs in{x, nullptr, w, no_bias};
  const NormProblem p = check_head_norm(op, in, eps, weight_offset);
  const Tensor y = allocate_y(op, p, x, std::nullopt), rstd = allocate_statistics(p, x);
  static OpPaths paths(op);
  forward(paths, p, in, y, {.rstd = rstd});
  return {y, rstd};
}

Tensors2 head_norm_bwd(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                       const Tensor& rstd, double weight_offset, int64_t grad_mask) {
  constexpr const char* op = "head_norm_bwd";
  const OptTensor w = weight, no_bias;
  const NormProblem p = check_head_norm(op, {x, nullptr, w, no_bias}, 0.0, weight_offset);
  static OpPaths paths(op);
  const auto [grad_x, grad_weight, none] =
      backward(op, paths, p, grad_y, x, w, no_bias, nullptr, rstd, grad_mask & 3);
  return {grad_x, grad_weight};
}

}  // namespace ikbo
