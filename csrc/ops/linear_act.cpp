#include "launch/stream.h"
#include "ops/checks.h"
#include "ops/gated_backward.h"
#include "ops/linear_operands.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace ikbo {
namespace {

Activation check_inputs(const char* op, const Tensor& x, const Tensor& w, const OptTensor& b,
                        const std::string& activation) {
  check_features(op, "x", x);
  check_linear(op, "w", w, "b", b, "x.size(-1)", x.size(x.dim() - 1), x);
  return parse_activation(op, activation);
}

Tensor allocate_out(const Tensor& x, const Tensor& w) {
  return empty(with_features(x, w.size(0)), x.scalar_type(), x);
}

// The product, its activation and a widened x, in the accumulation type.
int64_t row_bytes(const Tensor& x, const Tensor& w) {
  return accumulate_bytes(x.size(1) + 2 * w.size(0), x.scalar_type());
}

void linear_act_reference(const Tensor& x, const Tensor& w, const OptTensor& b,
                          Activation activation, const Tensor& out, const OptTensor& preact) {
  for_each_slice(x, x.size(0), row_bytes(x, w), [&](int64_t first, int64_t count) {
    const Tensor pre = linear_accumulate(narrow(x, 0, first, count), w, b);
    if (preact) copy_(narrow(*preact, 0, first, count), pre);
    copy_(narrow(out, 0, first, count), apply_activation(activation, pre));
  });
}

void run_kernels(OpPaths& paths, const Tensor& x, const Linear& linear, Activation activation,
                 const Tensor& out, const OptTensor& preact) {
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const LinearProblem problem{x.size(0), linear.w.size(0), x.size(1)};
  LinearActConfig config = linear_act_config(problem, device_limits(device));
  LinearOperands linears;
  LinearActParams params{};
  params.is_bfloat16 = x.scalar_type() == ScalarType::BFloat16;
  params.x = x.const_data_ptr();
  params.x_stride = aligned_row_stride(x);
  params.w = linears.read(linear);
  params.out = out.mutable_data_ptr();
  params.out_stride = aligned_row_stride(out);
  if (preact) params.preact = preact->mutable_data_ptr();
  params.activation = activation;
  config.packed_weights = linears.packed();
  paths.kernel(config);
  linears.pack(stream);
  run_linear_act(params, problem, config.product, stream);
}

// All as rows.
void compute(OpPaths& paths, const Tensor& x, const Linear& linear, Activation activation,
             const Tensor& out, const OptTensor& preact) {
  if (out.numel() == 0) return;
  const auto of_problem = [&](const DeviceLimits& device) {
    return linear_act_decline_reason({x.size(0), linear.w.size(0), x.size(1)}, device);
  };
  if (paths.takes_kernel(x.is_cuda(), rows_decline_reason(x, out, of_problem))) {
    return run_kernels(paths, x, linear, activation, out, preact);
  }
  linear_act_reference(x, linear.w, linear.bias, activation, out, preact);
}

}  // namespace

Tensor linear_act(const Tensor& x, const Tensor& w, const OptTensor& b,
                  const std::string& activation) {
  constexpr const char* op = "linear_act";
  const Activation act = check_inputs(op, x, w, b, activation);
  const Tensor out = allocate_out(x, w);
  static OpPaths paths(op);
  compute(paths, as_rows(x), {w, b}, act, as_rows(out), std::nullopt);
  return out;
}

Tensors2 linear_act_fwd(const Tensor& x, const Tensor& w, const OptTensor& b,
                        const std::string& activation) {
  constexpr const char* op = "linear_act_fwd";
  const Activation act = check_inputs(op, x, w, b, activation);
  const Tensor out = allocate_out(x, w);
  const Tensor preact = allocate_preactivation(out, act);
  static OpPaths paths(op);
  compute(paths, as_rows(x), {w, b}, act, as_rows(out),
          needs_preactivation(act) ? OptTensor(as_rows(preact)) : std::nullopt);
  return {out, preact};
}

Tensors3 linear_act_bwd(const Tensor& grad_out, const Tensor& x, const Tensor& w,
                        const Tensor& saved, const std::string& activation, int64_t grad_mask) {
  constexpr const char* op = "linear_act_bwd";
  const Activation act = check_inputs(op, x, w, std::nullopt, activation);
  const Sizes out_sizes = with_features(x, w.size(0));
  check_shape(op, "grad_out", grad_out, out_sizes, "[..., N]", x);
  if (act != Activation::kNone) {
    check_shape(op, "saved (preact, or out for relu and sigmoid)", saved, out_sizes, "[..., N]", x);
  }
  IKBO_RECORD_BACKWARD(op, is_hopper_16_bit(x), x.is_cuda());
  const ScalarType dtype = x.scalar_type(), sums = accumulate_type(dtype);
  const Tensor rows = as_rows(x), grad_rows = as_rows(grad_out);
  const OptTensor saved_rows = act == Activation::kNone ? std::nullopt : OptTensor(as_rows(saved));
  if (is_hopper_16_bit(x)) {
    const LinearGrads grads = linear_act_backward(grad_rows, rows, w, saved_rows, act, grad_mask);
    return {wants(grad_mask, 0) ? reshape(grads.x, sizes_of(x)) : grads.x, grads.w, grads.b};
  }
  const Tensor grad_x = wants(grad_mask, 0) ? empty(sizes_of(rows), dtype, x) : nothing(dtype, x);
  SliceSum grad_w(wants(grad_mask, 1), sizes_of(w), x);
  SliceSum grad_b(wants(grad_mask, 2), {w.size(0)}, x);
  for_each_slice(rows, rows.size(0), 2 * row_bytes(rows, w), [&](int64_t first, int64_t count) {
    Tensor grad = cast(narrow(grad_rows, 0, first, count), sums);
    if (saved_rows) {
      grad = activation_backward(act, grad, cast(narrow(*saved_rows, 0, first, count), sums));
    }
    grad_b.add_columns(grad);
    const Tensor operand = as_operand(grad, dtype);
    grad_w.add_product(operand, narrow(rows, 0, first, count));
    if (wants(grad_mask, 0)) copy_(narrow(grad_x, 0, first, count), mm_accumulate(operand, w));
  });
  return {wants(grad_mask, 0) ? reshape(grad_x, sizes_of(x)) : grad_x, grad_w.rounded(dtype),
          grad_b.rounded(dtype)};
}

}  // namespace ikbo
