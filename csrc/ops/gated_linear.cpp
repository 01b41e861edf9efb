#include "launch/stream.h"
#include "ops/checks.h"
#include "ops/gated_backward.h"
#include "ops/linear_operands.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace ikbo {
namespace {

Activation check_inputs(const char* op, const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                        const OptTensor& b_gate, const OptTensor& b_up,
                        const std::string& activation) {
  check_features(op, "x", x);
  const int64_t features = x.size(x.dim() - 1);
  check_linear(op, "w_gate", w_gate, "b_gate", b_gate, "x.size(-1)", features, x);
  check_linear(op, "w_up", w_up, "b_up", b_up, "x.size(-1)", features, x);
  check_size(op, "w_up", w_up, 0, w_gate.size(0), "w_gate.size(0)");
  return parse_activation(op, activation);
}

Tensor allocate_out(const Tensor& x, const Tensor& w_gate) {
  return empty(with_features(x, w_gate.size(0)), x.scalar_type(), x);
}

void run_kernels(OpPaths& paths, const Tensor& x, const Linear& gate, const Linear& up,
                 Activation activation, const Tensor& out, const std::optional<GatedSides>& saved) {
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const LinearProblem problem{x.size(0), gate.w.size(0), x.size(1)};
  GatedLinearConfig config = gated_linear_config(problem, device_limits(device));
  LinearOperands linears;
  const LinearWeight gate_weight = linears.read(gate), up_weight = linears.read(up);
  config.packed_weights = linears.packed();
  paths.kernel(config);
  linears.pack(stream);
  run_gated_linear(gated_linear_params(x, gate_weight, up_weight, activation, out, saved), problem,
                   config.product, stream);
}

// All as rows.
void compute(OpPaths& paths, const Tensor& x, const Linear& gate, const Linear& up,
             Activation activation, const Tensor& out, const std::optional<GatedSides>& saved) {
  if (out.numel() == 0) return;
  const auto of_problem = [&](const DeviceLimits& device) {
    return gated_linear_decline_reason({x.size(0), gate.w.size(0), x.size(1)}, device);
  };
  if (paths.takes_kernel(x.is_cuda(), rows_decline_reason(x, out, of_problem))) {
    return run_kernels(paths, x, gate, up, activation, out, saved);
  }
  gated_reference(x, gate, up, std::nullopt, activation, out, saved);
}

}  // namespace

void gated_linear_out(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                      const OptTensor& b_gate, const OptTensor& b_up, const std::string& activation,
                      const Tensor& out) {
  constexpr const char* op = "gated_linear";
  const Activation act = check_inputs(op, x, w_gate, w_up, b_gate, b_up, activation);
  check_out(op, out, with_features(x, w_gate.size(0)), x.scalar_type(), x);
  static OpPaths paths(op);
  fill_as_rows(out, [&](const Tensor& rows) {
    compute(paths, as_rows(x), {w_gate, b_gate}, {w_up, b_up}, act, rows, std::nullopt);
  });
}

Tensor gated_linear(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                    const OptTensor& b_gate, const OptTensor& b_up, const std::string& activation) {
  constexpr const char* op = "gated_linear";
  const Activation act = check_inputs(op, x, w_gate, w_up, b_gate, b_up, activation);
  const Tensor out = allocate_out(x, w_gate);
  static OpPaths paths(op);
  compute(paths, as_rows(x), {w_gate, b_gate}, {w_up, b_up}, act, as_rows(out), std::nullopt);
  return out;
}

Tensors3 gated_linear_fwd(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                          const OptTensor& b_gate, const OptTensor& b_up,
                          const std::string& activation) {
  constexpr const char* op = "gated_linear_fwd";
  const Activation act = check_inputs(op, x, w_gate, w_up, b_gate, b_up, activation);
  const Tensor out = allocate_out(x, w_gate);
  const GatedSides saved{allocate_out(x, w_gate), allocate_out(x, w_gate)};
  static OpPaths paths(op);
  compute(paths, as_rows(x), {w_gate, b_gate}, {w_up, b_up}, act, as_rows(out),
          GatedSides{as_rows(saved.gate), as_rows(saved.up)});
  return {out, saved.gate, saved.up};
}

Tensors5 gated_linear_bwd(const Tensor& grad_out, const Tensor& x, const Tensor& w_gate,
                          const Tensor& w_up, const Tensor& gate, const Tensor& up,
                          const std::string& activation, int64_t grad_mask) {
  constexpr const char* op = "gated_linear_bwd";
  const Activation act = check_inputs(op, x, w_gate, w_up, std::nullopt, std::nullopt, activation);
  const Sizes out_sizes = with_features(x, w_gate.size(0));
  check_shape(op, "grad_out", grad_out, out_sizes, "[..., N]", x);
  check_shape(op, "gate", gate, out_sizes, "[..., N]", x);
  check_shape(op, "up", up, out_sizes, "[..., N]", x);
  static OpPaths paths(op);
  const GatedGrads grads =
      gated_backward(paths, as_rows(grad_out), as_rows(x), w_gate, w_up, std::nullopt,
                     {as_rows(gate), as_rows(up)}, act, grad_mask & 0b11111);
  const Tensor grad_x = wants(grad_mask, 0) ? reshape(grads.x, sizes_of(x)) : grads.x;
  return {grad_x, grads.w_gate, grads.w_up, grads.b_gate, grads.b_up};
}

}  // namespace ikbo
