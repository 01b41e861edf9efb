#include "launch/stream.h"
#include "ops/checks.h"
#include "ops/gated_backward.h"
#include "ops/linear_operands.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace ikbo {
namespace {

Activation check_inputs(const char* op, const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                        const OptTensor& b_gate, const OptTensor& b_up, const Tensor& w_down,
                        const OptTensor& b_down, const std::string& activation) {
  check_features(op, "x", x);
  const int64_t features = x.size(x.dim() - 1);
  check_linear(op, "w_gate", w_gate, "b_gate", b_gate, "x.size(-1)", features, x);
  check_linear(op, "w_up", w_up, "b_up", b_up, "x.size(-1)", features, x);
  check_size(op, "w_up", w_up, 0, w_gate.size(0), "w_gate.size(0)");
  check_linear(op, "w_down", w_down, "b_down", b_down, "w_gate.size(0)", w_gate.size(0), x);
  return parse_activation(op, activation);
}

Tensor allocate(const Tensor& x, int64_t features) {
  return empty(with_features(x, features), x.scalar_type(), x);
}

struct Linears {
  Linear gate, up, down;
};

LinearProblem hidden_problem(const Tensor& x, const Linears& mlp) {
  return {x.size(0), mlp.gate.w.size(0), x.size(1)};
}

void run_kernels(OpPaths& paths, const Tensor& x, const Linears& mlp, Activation activation,
                 const Tensor& out, const std::optional<GatedSides>& saved) {
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const LinearProblem problem = hidden_problem(x, mlp);
  GatedMlpConfig config = gated_mlp_config(problem, out.size(1), device_limits(device));
  LinearOperands linears;
  const LinearWeight gate = linears.read(mlp.gate), up = linears.read(mlp.up);
  const LinearWeight down = linears.read(mlp.down);
  const Tensor hidden = empty({problem.M, problem.N}, x.scalar_type(), x);

  GatedLinearParams first = gated_linear_params(x, gate, up, activation, hidden, saved);
  LinearActParams second{};
  second.is_bfloat16 = first.is_bfloat16;
  second.x = hidden.const_data_ptr();
  second.x_stride = first.out_stride;
  second.w = down;
  second.out = out.mutable_data_ptr();
  second.out_stride = aligned_row_stride(out);
  second.activation = Activation::kNone;
  second.x_is_under_way = true;

  config.packed_weights = linears.packed();
  paths.kernel(config);
  linears.pack(stream);
  run_gated_linear(first, problem, config.hidden, stream);
  run_linear_act(second, {problem.M, out.size(1), problem.N}, config.down, stream);
}

// All as rows.
void compute(OpPaths& paths, const Tensor& x, const Linears& mlp, Activation activation,
             const Tensor& out, const std::optional<GatedSides>& saved) {
  if (x.size(0) == 0 || (out.numel() == 0 && !saved)) return;
  const auto of_problem = [&](const DeviceLimits& device) {
    return gated_mlp_decline_reason(hidden_problem(x, mlp), out.size(1), device);
  };
  if (paths.takes_kernel(x.is_cuda(), rows_decline_reason(x, out, of_problem))) {
    return run_kernels(paths, x, mlp, activation, out, saved);
  }
  gated_reference(x, mlp.gate, mlp.up, mlp.down, activation, out, saved);
}

}  // namespace

void gated_mlp_out(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                   const OptTensor& b_gate, const OptTensor& b_up, const Tensor& w_down,
                   const OptTensor& b_down, const std::string& activation, const Tensor& out) {
  constexpr const char* op = "gated_mlp";
  const Activation act =
      check_inputs(op, x, w_gate, w_up, b_gate, b_up, w_down, b_down, activation);
  check_out(op, out, with_features(x, w_down.size(0)), x.scalar_type(), x);
  static OpPaths paths(op);
  fill_as_rows(out, [&](const Tensor& rows) {
    compute(paths, as_rows(x), {{w_gate, b_gate}, {w_up, b_up}, {w_down, b_down}}, act, rows,
            std::nullopt);
  });
}

Tensor gated_mlp(const Tensor& x, const Tensor& w_gate, const Tensor& w_up, const OptTensor& b_gate,
                 const OptTensor& b_up, const Tensor& w_down, const OptTensor& b_down,
                 const std::string& activation) {
  constexpr const char* op = "gated_mlp";
  const Activation act =
      check_inputs(op, x, w_gate, w_up, b_gate, b_up, w_down, b_down, activation);
  const Tensor out = allocate(x, w_down.size(0));
  static OpPaths paths(op);
  compute(paths, as_rows(x), {{w_gate, b_gate}, {w_up, b_up}, {w_down, b_down}}, act, as_rows(out),
          std::nullopt);
  return out;
}

Tensors3 gated_mlp_fwd(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                       const OptTensor& b_gate, const OptTensor& b_up, const Tensor& w_down,
                       const OptTensor& b_down, const std::string& activation) {
  constexpr const char* op = "gated_mlp_fwd";
  const Activation act =
      check_inputs(op, x, w_gate, w_up, b_gate, b_up, w_down, b_down, activation);
  const Tensor out = allocate(x, w_down.size(0));
  const GatedSides saved{allocate(x, w_gate.size(0)), allocate(x, w_gate.size(0))};
  static OpPaths paths(op);
  compute(paths, as_rows(x), {{w_gate, b_gate}, {w_up, b_up}, {w_down, b_down}}, act, as_rows(out),
          GatedSides{as_rows(saved.gate), as_rows(saved.up)});
  return {out, saved.gate, saved.up};
}

Tensors7 gated_mlp_bwd(const Tensor& grad_out, const Tensor& x, const Tensor& w_gate,
                       const Tensor& w_up, const Tensor& w_down, const Tensor& gate,
                       const Tensor& up, const std::string& activation, int64_t grad_mask) {
  constexpr const char* op = "gated_mlp_bwd";
  const Activation act = check_inputs(op, x, w_gate, w_up, std::nullopt, std::nullopt, w_down,
                                      std::nullopt, activation);
  check_shape(op, "grad_out", grad_out, with_features(x, w_down.size(0)), "[..., Nout]", x);
  check_shape(op, "gate", gate, with_features(x, w_gate.size(0)), "[..., N]", x);
  check_shape(op, "up", up, with_features(x, w_gate.size(0)), "[..., N]", x);
  static OpPaths paths(op);
  const GatedGrads grads = gated_backward(paths, as_rows(grad_out), as_rows(x), w_gate, w_up,
                                          w_down, {as_rows(gate), as_rows(up)}, act, grad_mask);
  const Tensor grad_x = wants(grad_mask, 0) ? reshape(grads.x, sizes_of(x)) : grads.x;
  return {grad_x, grads.w_gate, grads.w_up, grads.b_gate, grads.b_up, grads.w_down, grads.b_down};
}

}  // namespace ikbo
