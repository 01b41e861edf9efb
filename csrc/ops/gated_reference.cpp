#include "ops/gated_reference.h"

#include "ops/checks.h"
#include "ops/ops.h"

namespace ikbo {
namespace {

Tensor gated_product(Activation activation, const GatedSides& sides) {
  return mul(apply_activation(activation, sides.gate), sides.up);
}

}  // namespace

Tensor as_rows(const Tensor& t) {
  if (t.dim() == 2) return t;
  int64_t rows = 1;
  for (int64_t dim = 0; dim < t.dim() - 1; ++dim) rows *= t.size(dim);
  return reshape(t, Sizes{rows, t.size(t.dim() - 1)});
}

Sizes with_features(const Tensor& x, int64_t features) {
  Sizes sizes = sizes_of(x);
  sizes.back() = features;
  return sizes;
}

void check_features(const char* op, const char* name, const Tensor& x) {
  IKBO_CHECK(x.dim() >= 1, op, "expected ", name, " of shape [..., K], got ", shape_text(x), ".");
  check_floating(op, name, x);
}

void check_linear(const char* op, const char* w_name, const Tensor& w, const char* b_name,
                  const OptTensor& bias, const char* x_name, int64_t features, const Tensor& like) {
  check_dim(op, w_name, w, {"out_features", "in_features"});
  check_like(op, w_name, w, "x", like);
  check_size(op, w_name, w, 1, features, x_name);
  if (bias) {
    check_dim(op, b_name, *bias, {"out_features"});
    check_size(op, b_name, *bias, 0, w.size(0), (std::string(w_name) + ".size(0)").c_str());
    check_like(op, b_name, bias, "x", like);
  }
}

void check_shape(const char* op, const char* name, const Tensor& t, const Sizes& sizes,
                 const char* shape_name, const Tensor& x) {
  IKBO_CHECK(sizes_of(t) == sizes, op, "expected ", name, " of shape ", shape_name, ", got ",
             shape_text(t), ".");
  check_like(op, name, t, "x", x);
}

Tensor linear_accumulate(const Tensor& x, const Tensor& w, const OptTensor& bias) {
  const Tensor product = mm_accumulate(x, transpose(w, 0, 1));
  return bias ? add(product, cast(*bias, product.scalar_type())) : product;
}

SliceSum::SliceSum(bool wanted, const Sizes& sizes, const Tensor& like)
    : wanted_(wanted),
      total_(zeros(wanted ? sizes : Sizes{0}, accumulate_type(like.scalar_type()), like)) {}

void SliceSum::add_product(const Tensor& grad, const Tensor& x) {
  if (wanted_) total_ = add(total_, mm_accumulate(transpose(grad, 0, 1), x));
}

void SliceSum::add_columns(const Tensor& grad) {
  if (wanted_) total_ = add(total_, sum_over(grad, {0}));
}

void gated_reference(const Tensor& x, const Linear& gate, const Linear& up,
                     const std::optional<Linear>& down, Activation activation, const Tensor& out,
                     const std::optional<GatedSides>& saved) {
  const ScalarType dtype = x.scalar_type();
  // gate, up, act(gate) and their product, beside a widened x and the last product.
  const int64_t elements = x.size(1) + 4 * gate.w.size(0) + (down ? out.size(1) : 0);
  for_each_slice(x, x.size(0), accumulate_bytes(elements, dtype),
                 [&](int64_t first, int64_t count) {
                   const Tensor rows = narrow(x, 0, first, count);
                   const auto hidden = [&] {
                     const GatedSides sides{linear_accumulate(rows, gate.w, gate.bias),
                                            linear_accumulate(rows, up.w, up.bias)};
                     if (saved) {
                       copy_(narrow(saved->gate, 0, first, count), sides.gate);
                       copy_(narrow(saved->up, 0, first, count), sides.up);
                     }
                     return cast(gated_product(activation, sides), dtype);
                   }();
                   copy_(narrow(out, 0, first, count),
                         down ? linear_accumulate(hidden, down->w, down->bias) : hidden);
                 });
}

GatedGrads gated_backward_reference(const Tensor& grad_out, const Tensor& x, const Tensor& w_gate,
                                    const Tensor& w_up, const OptTensor& w_down,
                                    const GatedSides& saved, Activation activation,
                                    int64_t grad_mask) {
  const ScalarType dtype = x.scalar_type(), sums = accumulate_type(dtype);
  const int64_t N = w_gate.size(0);
  const Tensor grad_x = wants(grad_mask, 0) ? empty(sizes_of(x), dtype, x) : nothing(dtype, x);
  SliceSum grad_w_gate(wants(grad_mask, 1), sizes_of(w_gate), x);
  SliceSum grad_w_up(wants(grad_mask, 2), sizes_of(w_up), x);
  SliceSum grad_b_gate(wants(grad_mask, 3), {N}, x);
  SliceSum grad_b_up(wants(grad_mask, 4), {N}, x);
  SliceSum grad_w_down(wants(grad_mask, 5), w_down ? sizes_of(*w_down) : Sizes{}, x);
  SliceSum grad_b_down(wants(grad_mask, 6), {grad_out.size(1)}, x);

  const int64_t elements = 2 * x.size(1) + 8 * N + grad_out.size(1);
  for_each_slice(
      x, x.size(0), accumulate_bytes(elements, dtype), [&](int64_t first, int64_t count) {
        const Tensor rows = narrow(x, 0, first, count);
        const Tensor grad = cast(narrow(grad_out, 0, first, count), sums);
        const Tensor gate = cast(narrow(saved.gate, 0, first, count), sums);
        const Tensor up = cast(narrow(saved.up, 0, first, count), sums);
        const Tensor activated = apply_activation(activation, gate);
        Tensor grad_hidden = grad;
        if (w_down) {
          const Tensor operand = as_operand(grad, dtype);
          grad_w_down.add_product(operand, cast(mul(activated, up), dtype));
          grad_b_down.add_columns(grad);
          grad_hidden = mm_accumulate(operand, *w_down);
        }
        const Tensor grad_gate = activation_backward(
            activation, mul(grad_hidden, up), needs_preactivation(activation) ? gate : activated);
        const Tensor grad_up = mul(grad_hidden, activated);
        grad_b_gate.add_columns(grad_gate);
        grad_b_up.add_columns(grad_up);
        const Tensor gate_operand = as_operand(grad_gate, dtype);
        const Tensor up_operand = as_operand(grad_up, dtype);
        grad_w_gate.add_product(gate_operand, rows);
        grad_w_up.add_product(up_operand, rows);
        if (wants(grad_mask, 0)) {
          copy_(narrow(grad_x, 0, first, count),
                add(mm_accumulate(gate_operand, w_gate), mm_accumulate(up_operand, w_up)));
        }
      });
  return {grad_x,
          grad_w_gate.rounded(dtype),
          grad_w_up.rounded(dtype),
          grad_b_gate.rounded(dtype),
          grad_b_up.rounded(dtype),
          grad_w_down.rounded(dtype),
          grad_b_down.rounded(dtype)};
}

}  // namespace ikbo
