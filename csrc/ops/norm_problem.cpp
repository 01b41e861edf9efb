#include "ops/norm_problem.h"

#include <numeric>

namespace ikbo {
namespace {

bool is_supported(ScalarType t) {
  return is_16_bit(t) || t == ScalarType::Float || t == ScalarType::Double;
}

int64_t product(Sizes::const_iterator begin, Sizes::const_iterator end) {
  return std::accumulate(begin, end, int64_t{1}, std::multiplies<>());
}

// Any floating dtype; the shape of x's last dimensions.
void check_parameter(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  check_floating(op, name, t);
  check_same_device(op, name, t, "x", x);
  const auto expected = x.sizes(), got = t.sizes();
  const bool fits = t.dim() >= 1 && t.dim() <= x.dim() &&
                    std::equal(got.begin(), got.end(), expected.end() - got.size());
  IKBO_CHECK(fits, op, "expected ", name, " in the shape of x's last dimensions, got ", name, " ",
             shape_text(t), " for x ", shape_text(x), ".");
}

int64_t count_normalized(const char* op, const NormInputs& in, int64_t normalized_ndim) {
  if (!in.weight && !in.bias) {
    IKBO_CHECK(normalized_ndim >= 1 && normalized_ndim <= in.x.dim(), op,
               "expected normalized_ndim between 1 and x.dim() (", in.x.dim(), "), got ",
               normalized_ndim, ".");
    return normalized_ndim;
  }
  const int64_t dims = in.weight ? in.weight->dim() : in.bias->dim();
  IKBO_CHECK(normalized_ndim == 1 || normalized_ndim == dims, op,
             "expected normalized_ndim == ", dims, ", the dimensions of ",
             in.weight ? "weight" : "bias", ", got ", normalized_ndim,
             ". Leave it out: it matters only without weight and bias.");
  return dims;
}

}  // namespace

NormProblem check_norm(const char* op, NormKind kind, const NormInputs& in, double eps,
                       double weight_offset, int64_t normalized_ndim) {
  const Tensor& x = in.x;
  check_floating(op, "x", x);
  if (in.weight) check_parameter(op, "weight", *in.weight, x);
  if (in.bias) check_parameter(op, "bias", *in.bias, x);
  IKBO_CHECK(!in.weight || !in.bias || in.weight->dim() == in.bias->dim(), op,
             "expected bias in the shape of weight, got ", in.bias ? shape_text(*in.bias) : "",
             " and ", in.weight ? shape_text(*in.weight) : "", ".");
  IKBO_CHECK(in.weight || weight_offset == 0.0, op,
             "expected a weight beside weight_offset = ", weight_offset,
             ", got none. Leave weight_offset at 0, or pass the weight it is added to.");
  NormProblem p{
      kind, sizes_of(x), {}, 0, 1, 0, eps, weight_offset, accumulate_type(x.scalar_type())};
  if (in.residual) {
    check_floating(op, "residual", *in.residual);
    check_same_device(op, "residual", *in.residual, "x", x);
    IKBO_CHECK(sizes_of(*in.residual) == p.sizes, op, "expected residual in the shape of x ",
               shape_text(x), ", got ", shape_text(*in.residual), ".");
    if (in.residual->scalar_type() == ScalarType::Double) p.sums = ScalarType::Double;
  }
  const auto split = p.sizes.end() - count_normalized(op, in, normalized_ndim);
  p.leading.assign(p.sizes.begin(), split);
  p.rows = product(p.sizes.begin(), split);
  p.columns = product(split, p.sizes.end());
  return p;
}

NormProblem check_head_norm(const char* op, const NormInputs& in, double eps,
                            double weight_offset) {
  check_floating(op, "x", in.x);
  IKBO_CHECK(in.x.dim() >= 2, op, "expected x of shape [..., H, D], got ", shape_text(in.x), ".");
  check_dim(op, "weight", *in.weight, {"H", "D"});
  check_parameter(op, "weight", *in.weight, in.x);
  const Sizes sizes = sizes_of(in.x);
  return {NormKind::kRms,
          sizes,
          Sizes(sizes.begin(), sizes.end() - 1),
          product(sizes.begin(), sizes.end() - 2),
          *(sizes.end() - 2),
          sizes.back(),
          eps,
          weight_offset,
          accumulate_type(in.x.scalar_type())};
}

ScalarType result_dtype(const char* op, const char* name, std::optional<ScalarType> dtype,
                        ScalarType fallback) {
  if (!dtype) return fallback;
  IKBO_CHECK(is_supported(*dtype), op, "expected ", name,
             " to be float16, bfloat16, float32 or float64, got ", dtype_text(*dtype), ".");
  return *dtype;
}

Tensor allocate_residual_out(const char* op, const NormProblem& p, const Tensor& residual,
                             std::optional<ScalarType> residual_dtype) {
  return empty(p.sizes, result_dtype(op, "residual_dtype", residual_dtype, residual.scalar_type()),
               residual);
}

Tensor allocate_statistics(const NormProblem& p, const Tensor& x) {
  return empty(p.leading, p.sums, x);
}

}  // namespace ikbo
