#include "ops/norm_kernels.h"

#include "kernels/norm/norm.h"
#include "launch/device.h"
#include "launch/error.h"
#include "launch/stream.h"
#include "ops/operands.h"

namespace ikbo {
namespace {

// Tensors that live as long as the launch that reads them.
class Operands {
 public:
  explicit Operands(const NormProblem& p) : p_(p) {}

  // x, a residual or a gradient as rows: in place where its layout allows. One row in place of many
  // (the gradient of a sum) is read as that; what is left is copied.
  NormMatrix rows(const Tensor& t) {
    if (const auto stride = row_stride(t)) return matrix(t, *stride);
    Tensor first = t;
    for (int64_t d = 0; d < leading(); ++d) {
      if (first.size(d) > 1 && first.stride(d) == 0) first = narrow(first, d, 0, 1);
    }
    const bool one_row = first.numel() == p_.columns;
    const Tensor& copy = keep(contiguous_copy(one_row ? first : t));
    return matrix(copy, one_row ? 0 : p_.columns);
  }
  NormMatrix rows(const Tensor* t) { return t != nullptr ? rows(*t) : NormMatrix{}; }
  NormMatrix rows(const OptTensor& t) { return t ? rows(*t) : NormMatrix{}; }

  NormMatrix parameter(const OptTensor& t) {
    if (!t) return {};
    return matrix(t->is_contiguous() ? *t : keep(contiguous_copy(*t)), p_.columns);
  }
  const float* statistics(const Tensor* t) {
    if (t == nullptr) return nullptr;
    return (t->is_contiguous() ? *t : keep(contiguous_copy(*t))).const_data_ptr<float>();
  }

  static NormMatrix result(const OptTensor& t, int64_t columns) {
    return t ? matrix(*t, columns) : NormMatrix{};
  }

 private:
  int64_t leading() const { return static_cast<int64_t>(p_.leading.size()); }

  // From row to row of t as [rows, columns], if it can be seen so.
  std::optional<int64_t> row_stride(const Tensor& t) const {
    int64_t inner = 1;
    for (int64_t d = t.dim() - 1; d >= leading(); --d) {
      if (t.size(d) == 1) continue;
      if (t.stride(d) != inner) return std::nullopt;
      inner *= t.size(d);
    }
    std::optional<int64_t> stride;
    int64_t outer = 0;
    for (int64_t d = leading() - 1; d >= 0; --d) {
      if (t.size(d) == 1) continue;
      if (!stride) {
        stride = t.stride(d);
      } else if (t.stride(d) != outer) {
        return std::nullopt;
      }
      outer = t.stride(d) * t.size(d);
    }
    return stride ? stride : p_.columns;
  }

  const Tensor& keep(Tensor t) {
    kept_[count_] = std::move(t);
    return *kept_[count_++];
  }

  static NormMatrix matrix(const Tensor& t, int64_t stride) {
    const ElementType type = t.scalar_type() == ScalarType::BFloat16 ? ElementType::kBfloat16
                             : t.scalar_type() == ScalarType::Half   ? ElementType::kFloat16
                                                                     : ElementType::kFloat32;
    return {const_cast<void*>(t.const_data_ptr()), stride * bytes_of(type), type};
  }

  const NormProblem& p_;
  std::array<OptTensor, 8> kept_;
  int count_ = 0;
};

bool is_double(const Tensor& t) { return t.scalar_type() == ScalarType::Double; }
bool is_double(const OptTensor& t) { return t && is_double(*t); }

// Why the kernels don't take the call, or nullptr.
const char* decline_reason(const NormProblem& p, const Tensor& x) {
  if (!device_properties(x.get_device_index()).is_hopper()) return "the GPU is not a Hopper";
  constexpr int64_t kLimit = int64_t{1} << 31;
  if (p.columns == 0) return "rows without elements";
  if (p.rows >= kLimit || p.columns >= kLimit) return "2^31 rows or columns";
  return nullptr;
}

const char* decline_reason(const NormProblem& p, const NormInputs& in, const Tensor& y,
                           const NormOutputs& out) {
  const bool has_double = is_double(in.x) || (in.residual && is_double(*in.residual)) ||
                          is_double(in.weight) || is_double(in.bias) || is_double(y) ||
                          is_double(out.residual_out);
  return has_double ? "float64" : decline_reason(p, in.x);
}

const char* decline_reason(const NormProblem& p, const NormBackwardInputs& in,
                           const NormGrads& grads) {
  const bool has_double = p.sums == ScalarType::Double || is_double(in.x) || is_double(in.grad_y) ||
                          is_double(in.grad_residual_out) || is_double(in.weight) ||
                          is_double(grads.x) || is_double(grads.residual) ||
                          is_double(grads.weight) || is_double(grads.bias);
  return has_double ? "float64" : decline_reason(p, in.x);
}

float* data_of(const OptTensor& t) { return t ? t->mutable_data_ptr<float>() : nullptr; }

NormConfig config_of(NormPass pass, const NormProblem& p, const NormMatrix& x,
                     std::initializer_list<NormMatrix> staged, bool bias_sums, int device) {
  NormProblemSize size{p.rows, p.columns, bytes_of(x.type), 0, 0, bias_sums};
  for (const NormMatrix& operand : staged) {
    if (operand.data == nullptr && p.rows > 0) continue;
    size.staged_bytes += bytes_of(operand.type);
    ++size.staged_operands;
  }
  return norm_config(pass, size, device_limits(device));
}

void run_forward(OpPaths& paths, const NormProblem& p, const NormInputs& in, const Tensor& y,
                 const NormOutputs& out) {
  const int device = in.x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  Operands operands(p);
  NormForward f{};
  f.x = operands.rows(in.x);
  f.residual = operands.rows(in.residual);
  f.weight = operands.parameter(in.weight);
  f.bias = operands.parameter(in.bias);
  f.y = Operands::result(y, p.columns);
  f.residual_out = Operands::result(out.residual_out, p.columns);
  f.mean = data_of(out.mean);
  f.rstd = data_of(out.rstd);
  f.rows = p.rows;
  f.eps = static_cast<float>(p.eps);
  f.weight_offset = static_cast<float>(p.weight_offset);
  f.layer = p.kind == NormKind::kLayer;
  const NormConfig config = config_of(NormPass::kForward, p, f.x, {f.x, f.residual}, false, device);
  paths.kernel(config);
  if (p.rows == 0) return;
  OptTensor ticket;
  if (config.by_ticket) {
    ticket = empty({1}, ScalarType::Int, in.x);
    f.ticket = static_cast<uint32_t*>(ticket->mutable_data_ptr());
    IKBO_CUDA_CHECK(cudaMemsetAsync(f.ticket, 0, sizeof(uint32_t), stream));
  }
  run_norm_forward(f, config, stream);
}

void run_backward(OpPaths& paths, const NormProblem& p, const NormBackwardInputs& in,
                  const NormGrads& grads) {
  const int device = in.x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Operands operands(p);
  NormBackward b{};
  b.x = operands.rows(in.x);
  b.grad_y = operands.rows(in.grad_y);
  b.grad_residual_out = operands.rows(in.grad_residual_out);
  b.weight = operands.parameter(in.weight);
  b.grad_x = Operands::result(grads.x, p.columns);
  b.grad_residual = Operands::result(grads.residual, p.columns);
  b.grad_weight = Operands::result(grads.weight, p.columns);
  b.grad_bias = Operands::result(grads.bias, p.columns);
  b.mean = operands.statistics(in.mean);
  b.rstd = operands.statistics(&in.rstd);
  b.rows = p.rows;
  b.weight_offset = static_cast<float>(p.weight_offset);
  const NormConfig config =
      config_of(NormPass::kBackward, p, b.x, {b.x, b.grad_y, b.grad_residual_out},
                grads.bias.has_value(), device);
  const auto partials = [&](const OptTensor& grad) -> OptTensor {
    if (!grad) return std::nullopt;
    return empty({std::max<int64_t>(config.partials, 1), p.columns}, ScalarType::Float, in.x);
  };
  const OptTensor weight_partials = partials(grads.weight), bias_partials = partials(grads.bias);
  b.weight_partials = data_of(weight_partials);
  b.bias_partials = data_of(bias_partials);
  paths.kernel(config);
  run_norm_backward(b, config, current_stream(device));
}

}  // namespace

void norm_forward(OpPaths& paths, const NormProblem& p, const NormInputs& in, const Tensor& y,
                  const NormOutputs& out) {
  const bool is_cuda = in.x.is_cuda();
  if (paths.takes_kernel(is_cuda, is_cuda ? decline_reason(p, in, y, out) : nullptr)) {
    return run_forward(paths, p, in, y, out);
  }
  norm_reference(p, in, y, out);
}

void norm_backward(OpPaths& paths, const NormProblem& p, const NormBackwardInputs& in,
                   const NormGrads& grads) {
  const bool is_cuda = in.x.is_cuda();
  if (paths.takes_kernel(is_cuda, is_cuda ? decline_reason(p, in, grads) : nullptr)) {
    return run_backward(paths, p, in, grads);
  }
  norm_backward_reference(p, in, grads);
}

}  // namespace ikbo
