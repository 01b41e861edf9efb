#include "ops/norm_kernels.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace ikbo {
namespace {

constexpr double kMaxE4m3 = 448.0;
constexpr ScalarType kQuantized = ScalarType::Float8_e4m3fn;

struct Quantized {
  Tensor y_q;
  Tensor scale;  // a scale a row, [leading]; of size 0 where one was given
};

Quantized allocate_quantized(const char* op, const NormProblem& p, const Tensor& x,
                             const OptTensor& given) {
  if (given) {
    IKBO_CHECK(given->numel() == 1 && given->scalar_type() == ScalarType::Float, op,
               "expected scale of one element in float32, got ", shape_text(*given), " in ",
               dtype_text(given->scalar_type()), ". Leave it out for a scale a row.");
    check_same_device(op, "scale", *given, "x", x);
  }
  return {empty(p.sizes, kQuantized, x),
          given ? nothing(ScalarType::Float, x) : empty(p.leading, ScalarType::Float, x)};
}

// The fp32 scale of each row that makes its largest value 448. At least the smallest normal number:
// a row of zeros then divides into zeros. amax is NaN where the row has one, and so is its scale.
Tensor scale_of_rows(const Tensor& y) {
  if (y.size(2) == 0) {
    return full({y.size(0), 1, 1}, std::numeric_limits<float>::min(), ScalarType::Float, y);
  }
  const Tensor largest = torch::stable::amax(aten("aten::abs", "", y), 2, true);
  const Tensor top = scalar(kMaxE4m3, y.scalar_type(), y);
  const Tensor scale = cast(aten("aten::div", "Tensor", largest, top), ScalarType::Float);
  const Tensor smallest = scalar(std::numeric_limits<float>::min(), ScalarType::Float, y);
  return aten("aten::maximum", "", scale, smallest);
}

void norm_quant_reference(const NormProblem& p, const NormInputs& in, const OptTensor& given,
                          const Quantized& out, const NormOutputs& others) {
  if (p.rows == 0) return;
  const Tensor y_rows = reshape(out.y_q, {p.rows, 1, p.columns});
  const OptTensor scales = given ? std::nullopt : OptTensor(reshape(out.scale, {p.rows, 1, 1}));
  const OptTensor one_scale = given ? OptTensor(reshape(*given, {1, 1, 1})) : std::nullopt;
  const OptTensor top = scalar(kMaxE4m3, p.sums, in.x), bottom = scalar(-kMaxE4m3, p.sums, in.x);
  norm_rows_reference(p, in, others, [&](int64_t first, int64_t count, const Tensor& y) {
    const Tensor scale = given ? *one_scale : scale_of_rows(y);
    if (scales) copy_(narrow(*scales, 0, first, count), scale);
    const Tensor scaled = aten("aten::div", "Tensor", y, cast(scale, p.sums));
    copy_(narrow(y_rows, 0, first, count), aten("aten::clamp", "Tensor", scaled, bottom, top));
  });
}

void norm_quant(OpPaths& paths, const NormProblem& p, const NormInputs& in, const OptTensor& given,
                const Quantized& out, const NormOutputs& others) {
  const OptTensor of_rows = given ? std::nullopt : OptTensor(out.scale);
  if (norm_forward_kernel(paths, p, in, out.y_q, others, {given, of_rows})) return;
  norm_quant_reference(p, in, given, out, others);
}

}  // namespace

Tensors3 rms_norm_quant(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                        const OptTensor& scale, double eps, double weight_offset,
                        int64_t normalized_ndim) {
  constexpr const char* op = "rms_norm_quant";
  const NormInputs in{x, nullptr, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kRms, in, eps, weight_offset, normalized_ndim);
  const Quantized out = allocate_quantized(op, p, x, scale);
  const Tensor rstd = allocate_statistics(p, x);
  static OpPaths paths(op);
  norm_quant(paths, p, in, scale, out, {.rstd = rstd});
  return {out.y_q, out.scale, rstd};
}

Tensors4 layer_norm_quant(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                          const OptTensor& scale, double eps, double weight_offset,
                          int64_t normalized_ndim) {
  constexpr const char* op = "layer_norm_quant";
  const NormInputs in{x, nullptr, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kLayer, in, eps, weight_offset, normalized_ndim);
  const Quantized out = allocate_quantized(op, p, x, scale);
  const Tensor mean = allocate_statistics(p, x), rstd = allocate_statistics(p, x);
  static OpPaths paths(op);
  norm_quant(paths, p, in, scale, out, {.mean = mean, .rstd = rstd});
  return {out.y_q, out.scale, mean, rstd};
}

Tensors4 add_rms_norm_quant(const Tensor& x, const Tensor& residual, const OptTensor& weight,
                            const OptTensor& bias, const OptTensor& scale, double eps,
                            double weight_offset, OptDtype residual_dtype,
                            int64_t normalized_ndim) {
  constexpr const char* op = "add_rms_norm_quant";
  const NormInputs in{x, &residual, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kRms, in, eps, weight_offset, normalized_ndim);
  const Quantized out = allocate_quantized(op, p, x, scale);
  const Tensor residual_out = allocate_residual_out(op, p, residual, residual_dtype);
  const Tensor rstd = allocate_statistics(p, x);
  static OpPaths paths(op);
  norm_quant(paths, p, in, scale, out, {.residual_out = residual_out, .rstd = rstd});
  return {out.y_q, out.scale, residual_out, rstd};
}

Tensors5 add_layer_norm_quant(const Tensor& x, const Tensor& residual, const OptTensor& weight,
                              const OptTensor& bias, const OptTensor& scale, double eps,
                              double weight_offset, OptDtype residual_dtype,
                              int64_t normalized_ndim) {
  constexpr const char* op = "add_layer_norm_quant";
  const NormInputs in{x, &residual, weight, bias};
  const NormProblem p = check_norm(op, NormKind::kLayer, in, eps, weight_offset, normalized_ndim);
  const Quantized out = allocate_quantized(op, p, x, scale);
  const Tensor residual_out = allocate_residual_out(op, p, residual, residual_dtype);
  const Tensor mean = allocate_statistics(p, x), rstd = allocate_statistics(p, x);
  static OpPaths paths(op);
  norm_quant(paths, p, in, scale, out, {residual_out, mean, rstd});
  return {out.y_q, out.scale, residual_out, mean, rstd};
}

}  // namespace ikbo
