#include "ops/gated_backward.h"

#include "launch/stream.h"
#include "ops/linear_operands.h"
#include "ops/ops.h"

namespace ikbo {
namespace {

// Bits of a gated backward's grad_mask, in the order of GatedGrads.
enum : int64_t { kInput, kGateWeight, kUpWeight, kGateBias, kUpBias, kDownWeight, kDownBias };
constexpr int64_t kNeedPreactivations = (1 << kDownBias) - 1;

// A product of the library's: sums in fp32, rounded to the operands' type.
Tensor mm(const Tensor& a, const Tensor& b) { return aten("aten::mm", "", a, b); }
Tensor weight_grad(const Tensor& grad, const Tensor& x) { return mm(transpose(grad, 0, 1), x); }
// Sums of columns in fp32, rounded once; in an order that depends on the sizes alone.
Tensor bias_grad(const Tensor& grad) { return sum_over(grad, {0}); }

LinearProblem problem_of(const Tensor& x, const Tensor& w_gate) {
  return {x.size(0), w_gate.size(0), x.size(1)};
}

const char* decline_reason(const Tensor& x, const Tensor& w_gate) {
  if (!is_hopper_16_bit(x)) return "not a Hopper GPU, or not float16 or bfloat16";
  return gated_grad_decline_reason(problem_of(x, w_gate));
}

struct Run {
  const Tensor& x;
  const GatedSides saved;  // as kernels read them
  const Activation activation;
  const LinearProblem problem;
  const GatedGradConfig& config;
  const cudaStream_t stream;

  // From the result's gradient and w_down where config.has_hidden, or else from the hidden tensor's
  // gradient. Fills `hidden` where it is there.
  GatedSides preactivations(const Tensor& grad_out, const LinearWeight& w_down,
                            const OptTensor& hidden) const {
    const GatedSides grads{like_saved(), like_saved()};
    GatedGradParams params{};
    params.is_bfloat16 = is_bfloat16();
    params.grad = grad_out.const_data_ptr();
    params.grad_stride = aligned_row_stride(grad_out);
    params.w_down = w_down;
    params.out_features = grad_out.size(1);
    params.gate = saved.gate.const_data_ptr();
    params.up = saved.up.const_data_ptr();
    params.grad_gate = grads.gate.mutable_data_ptr();
    params.grad_up = grads.up.mutable_data_ptr();
    if (hidden) params.hidden = hidden->mutable_data_ptr();
    params.activation = activation;
    run_gated_grad(params, problem, config, stream);
    return grads;
  }

  Tensor input(const GatedSides& grads, const LinearWeight& w_gate,
               const LinearWeight& w_up) const {
    const Tensor grad_x = empty(sizes_of(x), x.scalar_type(), x);
    InputGradParams params{};
    params.is_bfloat16 = is_bfloat16();
    params.grad_gate = grads.gate.const_data_ptr();
    params.grad_up = grads.up.const_data_ptr();
    params.w_gate = w_gate;
    params.w_up = w_up;
    params.grad_x = grad_x.mutable_data_ptr();
    params.grad_x_stride = aligned_row_stride(grad_x);
    run_input_grad(params, problem, config, stream);
    return grad_x;
  }

  bool is_bfloat16() const { return x.scalar_type() == ScalarType::BFloat16; }
  Tensor like_saved() const { return empty({problem.M, problem.N}, x.scalar_type(), x); }
};

}  // namespace

GatedGrads gated_backward(OpPaths& paths, const Tensor& grad_out, const Tensor& x,
                          const Tensor& w_gate, const Tensor& w_up, const OptTensor& w_down,
                          const GatedSides& saved, Activation activation, int64_t grad_mask) {
  if (x.size(0) == 0 || !paths.takes_kernel(x.is_cuda(), decline_reason(x, w_gate))) {
    return gated_backward_reference(grad_out, x, w_gate, w_up, w_down, saved, activation,
                                    grad_mask);
  }
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const LinearProblem problem = problem_of(x, w_gate);
  const bool has_down = w_down.has_value();
  GatedGradConfig config = gated_grad_config(problem, has_down ? w_down->size(0) : 0,
                                             wants(grad_mask, kInput), device_limits(device));
  LinearOperands linears;
  LinearWeight down{}, gate{}, up{};
  if (config.has_hidden) down = linears.read({*w_down, std::nullopt});
  if (config.has_input) {
    gate = linears.read({w_gate, std::nullopt});
    up = linears.read({w_up, std::nullopt});
  }
  config.packed_weights = linears.packed();
  paths.kernel(config);
  linears.pack(stream);

  const Tensor none = nothing(x.scalar_type(), x);
  GatedGrads result{none, none, none, none, none, none, none};
  const bool by_rows = config.has_hidden && has_aligned_rows(grad_out);
  const Tensor grad = by_rows ? grad_out : as_kernels_read(grad_out);
  const Run run{x,          {as_kernels_read(saved.gate), as_kernels_read(saved.up)},
                activation, problem,
                config,     stream};
  if (grad_mask & kNeedPreactivations) {
    const OptTensor hidden =
        wants(grad_mask, kDownWeight) ? OptTensor(run.like_saved()) : std::nullopt;
    const Tensor of_hidden = has_down && !config.has_hidden ? mm(grad, *w_down) : grad;
    const GatedSides grads = run.preactivations(of_hidden, down, hidden);
    if (config.has_input) {
      result.x = run.input(grads, gate, up);
    } else if (wants(grad_mask, kInput)) {
      result.x = cast(add(mm_accumulate(grads.gate, w_gate), mm_accumulate(grads.up, w_up)),
                      x.scalar_type());
    }
    if (wants(grad_mask, kGateWeight)) result.w_gate = weight_grad(grads.gate, x);
    if (wants(grad_mask, kUpWeight)) result.w_up = weight_grad(grads.up, x);
    if (wants(grad_mask, kGateBias)) result.b_gate = bias_grad(grads.gate);
    if (wants(grad_mask, kUpBias)) result.b_up = bias_grad(grads.up);
    if (hidden) result.w_down = weight_grad(grad, *hidden);
  }
  if (wants(grad_mask, kDownBias)) result.b_down = bias_grad(grad);
  return result;
}

LinearGrads linear_act_backward(const Tensor& grad_out, const Tensor& x, const Tensor& w,
                                const OptTensor& saved, Activation activation, int64_t grad_mask) {
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor grad = grad_out;
  if (saved) {
    const Tensor of_out = as_kernels_read(grad_out), of = as_kernels_read(*saved);
    grad = empty(sizes_of(of_out), x.scalar_type(), x);
    LinearGradParams params{};
    params.is_bfloat16 = x.scalar_type() == ScalarType::BFloat16;
    params.grad = of_out.const_data_ptr();
    params.saved = of.const_data_ptr();
    params.grad_preact = grad.mutable_data_ptr();
    params.count = grad.numel();
    params.activation = activation;
    run_linear_grad(params, current_stream(device));
  }
  const Tensor none = nothing(x.scalar_type(), x);
  return {wants(grad_mask, 0) ? mm(grad, w) : none,
          wants(grad_mask, 1) ? weight_grad(grad, x) : none,
          wants(grad_mask, 2) ? bias_grad(grad) : none};
}

}  // namespace ikbo
