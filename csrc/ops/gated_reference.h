// What gated_linear, gated_mlp and linear_act share: products with weights as nn.Linear stores them
// (w [N, K]) over any leading dimensions, and the references of the gated ops. A gated_linear is a
// gated_mlp without its last Linear, so both are one function here.
#pragma once

#include "ops/activation.h"

namespace ikbo {

// ---- leading dimensions ----------------------------------------------------------------------
Tensor as_rows(const Tensor& t);                         // [..., K] -> [rows, K]
Sizes with_features(const Tensor& x, int64_t features);  // [..., features] after x's [..., K]
// Bytes of that many elements in the accumulation type of `dtype`.
inline int64_t accumulate_bytes(int64_t elements, ScalarType dtype) {
  return elements * (accumulate_type(dtype) == ScalarType::Double ? 8 : 4);
}
// An out= tensor as rows for `body` to fill, whatever its strides.
template <class Body>
void fill_as_rows(const Tensor& out, const Body& body) {
  const Tensor rows = as_rows(out);
  body(rows);
  const bool copied = rows.data_ptr() != out.data_ptr();
  if (copied) copy_(out, reshape(rows, sizes_of(out)));
}

// ---- checks ----------------------------------------------------------------------------------
void check_features(const char* op, const char* name, const Tensor& x);  // floating, [..., K]
// w [N, K] and its bias [N] beside features [..., K].
void check_linear(const char* op, const char* w_name, const Tensor& w, const char* b_name,
                  const OptTensor& bias, const char* x_name, int64_t features, const Tensor& like);
// A tensor of a given shape (`shape_name`, e.g. "[..., N]") in the dtype and on the device of x.
void check_shape(const char* op, const char* name, const Tensor& t, const Sizes& sizes,
                 const char* shape_name, const Tensor& x);

// ---- products --------------------------------------------------------------------------------
// x @ w^T + bias in the accumulation type; x [rows, K].
Tensor linear_accumulate(const Tensor& x, const Tensor& w, const OptTensor& bias);

// A gradient summed over slices of rows, in the accumulation type and in the order of the rows.
// Where it is not wanted nothing is computed and the result has size 0.
class SliceSum {
 public:
  SliceSum(bool wanted, const Sizes& sizes, const Tensor& like);
  void add_product(const Tensor& grad, const Tensor& x);  // grad^T @ x: a weight's
  void add_columns(const Tensor& grad);                   // a bias's
  Tensor rounded(ScalarType dtype) const { return cast(total_, dtype); }

 private:
  bool wanted_;
  Tensor total_;
};

// ---- gated ops -------------------------------------------------------------------------------
struct Linear {
  Tensor w;
  OptTensor bias;
};
struct GatedSides {
  Tensor gate, up;
};

// out = act(gate) * up of x's rows and, where `down` is there, down(out rounded). The
// pre-activations go to `saved` where it is there.
void gated_reference(const Tensor& x, const Linear& gate, const Linear& up,
                     const std::optional<Linear>& down, Activation activation, const Tensor& out,
                     const std::optional<GatedSides>& saved);

struct GatedGrads {
  Tensor x, w_gate, w_up, b_gate, b_up, w_down, b_down;  // in the order of grad_mask's bits
};
// All as rows; the hidden tensor is computed again from the saved pre-activations.
GatedGrads gated_backward_reference(const Tensor& grad_out, const Tensor& x, const Tensor& w_gate,
                                    const Tensor& w_up, const OptTensor& w_down,
                                    const GatedSides& saved, Activation activation,
                                    int64_t grad_mask);

}  // namespace ikbo
