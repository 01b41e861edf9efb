#include "ops/linear_operands.h"

namespace ikbo {

LinearWeight LinearOperands::read(const Linear& linear) {
  const WeightOperands::Operand weight = weights_.read(linear.w);
  OptTensor& bias = biases_[read_++];
  if (linear.bias) bias = as_kernels_read(*linear.bias);
  return {weight.data, weight.row_stride, bias ? bias->const_data_ptr() : nullptr};
}

GatedLinearParams gated_linear_params(const Tensor& x, const LinearWeight& gate,
                                      const LinearWeight& up, Activation activation,
                                      const Tensor& out, const std::optional<GatedSides>& saved) {
  GatedLinearParams params{};
  params.is_bfloat16 = x.scalar_type() == ScalarType::BFloat16;
  params.x = x.const_data_ptr();
  params.x_stride = aligned_row_stride(x);
  params.gate = gate;
  params.up = up;
  params.out = out.mutable_data_ptr();
  params.out_stride = aligned_row_stride(out);
  if (saved) {
    params.gate_preact = saved->gate.mutable_data_ptr();
    params.up_preact = saved->up.mutable_data_ptr();
  }
  params.activation = activation;
  return params;
}

}  // namespace ikbo
