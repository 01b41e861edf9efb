#include "ops/norm_kernels.h"

#include "config/norm_backward.h"
#include "kernels/norm/norm.h"
#include "launch/device.h"
#include "launch/stream.h"
#include "ops/operands.h"

namespace ikbo {
namespace {

ElementType element_type(ScalarType type) {
  return type == ScalarType::BFloat16 ? ElementType::kBfloat16
         : type == ScalarType::Half   ? ElementType::kFloat16
                                      : ElementType::kFloat32;
}

// The tensors of a call as the kernels see them, and what lives as long as the launch for that.
class Operands {
 public:
  Operands(const NormProblem& p, const Tensor& x) : p_(p), x_type_(x.scalar_type()) {}

  // x, a residual or a gradient as rows: in place where its layout allows. What there is once in
  // place of many times (the gradient of a sum) is read as that; what is left is copied.
  NormMatrix rows(const Tensor& t) {
    if (fits(t)) {
      if (const auto strides = row_strides(t)) return matrix(t, *strides);
    }
    Tensor once = t;
    for (int64_t d = 0; d < leading(); ++d) {
      if (once.size(d) > 1 && once.stride(d) == 0) once = narrow(once, d, 0, 1);
    }
    const int64_t count = once.numel(), all_groups = p_.groups * p_.columns;
    if (count == p_.columns) return matrix(keep(copy(once)), {0, 0});
    if (count == all_groups) return matrix(keep(copy(once)), {0, p_.columns});
    return matrix(keep(copy(t)), {all_groups, p_.columns});
  }
  NormMatrix rows(const Tensor* t) { return t != nullptr ? rows(*t) : NormMatrix{}; }
  NormMatrix rows(const OptTensor& t) { return t ? rows(*t) : NormMatrix{}; }

  // weight or bias.
  NormMatrix parameter(const OptTensor& t) {
    if (!t) return {};
    const bool as_it_is = fits(*t) && t->is_contiguous() && is_aligned(*t);
    return matrix(as_it_is ? *t : keep(copy(*t)), {p_.columns, p_.columns});
  }
  const float* statistics(const Tensor* t) {
    if (t == nullptr) return nullptr;
    return (t->is_contiguous() ? *t : keep(contiguous_copy(*t))).const_data_ptr<float>();
  }

  // What finish() then copies to where the kernel can't write.
  NormMatrix result(const OptTensor& t) {
    if (!t) return {};
    const std::array<int64_t, 2> dense{p_.groups * p_.columns, p_.columns};
    if (fits(*t)) {
      if (t->is_contiguous()) return matrix(*t, dense);
      const auto strides = row_strides(*t);
      if (strides && (*strides)[0] >= dense[0] && (*strides)[1] >= dense[1]) {
        return matrix(*t, *strides);
      }
    }
    const Tensor& result = keep(empty(p_.sizes, fits(*t) ? t->scalar_type() : kFloat, *t));
    late_[late_count_++] = {t, result};
    return matrix(result, dense);
  }
  // A weight's or bias's gradient.
  NormMatrix sums(const OptTensor& t) {
    if (!t) return {};
    if (t->scalar_type() != ScalarType::Double) return matrix(*t, {p_.columns, p_.columns});
    const Tensor& result = keep(empty(sizes_of(*t), kFloat, *t));
    late_[late_count_++] = {t, result};
    return matrix(result, {p_.columns, p_.columns});
  }
  void finish() const {
    for (int i = 0; i < late_count_; ++i) copy_(*late_[i].to, *late_[i].from);
  }

 private:
  static constexpr ScalarType kFloat = ScalarType::Float;

  int64_t leading() const { return static_cast<int64_t>(p_.leading.size()); }

  // Kernels read and write x's type and float32, and beside a float32 x any but float64.
  bool fits(const Tensor& t) const {
    const ScalarType type = t.scalar_type();
    if (type == ScalarType::Float8_e4m3fn) return true;  // a quantised y
    return type == x_type_ || type == kFloat || (x_type_ == kFloat && is_16_bit(type));
  }
  Tensor copy(const Tensor& t) const {
    return fits(t) ? contiguous_copy(t) : contiguous_copy(cast(t, kFloat));
  }

  // From row to row of a group and from group to group of t, if it can be seen as
  // [rows, groups, columns] with columns side by side.
  std::optional<std::array<int64_t, 2>> row_strides(const Tensor& t) const {
    int64_t inner = 1;
    for (int64_t d = t.dim() - 1; d >= leading(); --d) {
      if (t.size(d) == 1) continue;
      if (t.stride(d) != inner) return std::nullopt;
      inner *= t.size(d);
    }
    int64_t rows_end = leading(), group = p_.columns;
    if (p_.groups > 1) group = t.stride(--rows_end);
    std::optional<int64_t> stride;
    int64_t outer = 0;
    for (int64_t d = rows_end - 1; d >= 0; --d) {
      if (t.size(d) == 1) continue;
      if (!stride) {
        stride = t.stride(d);
      } else if (t.stride(d) != outer) {
        return std::nullopt;
      }
      outer = t.stride(d) * t.size(d);
    }
    return std::array<int64_t, 2>{stride.value_or(p_.groups * p_.columns), group};
  }

  const Tensor& keep(Tensor t) {
    kept_[count_] = std::move(t);
    return *kept_[count_++];
  }

  // Strides in elements, from row to row and from group to group.
  static NormMatrix matrix(const Tensor& t, std::array<int64_t, 2> strides) {
    const ElementType type = element_type(t.scalar_type());
    const int size = t.scalar_type() == ScalarType::Float8_e4m3fn ? 1 : bytes_of(type);
    return {const_cast<void*>(t.const_data_ptr()), strides[0] * size, strides[1] * size, type};
  }

  struct Late {
    OptTensor to, from;
  };

  const NormProblem& p_;
  const ScalarType x_type_;
  std::array<OptTensor, 12> kept_;
  int count_ = 0;
  std::array<Late, 4> late_;
  int late_count_ = 0;
};

// Why the kernels don't take the call, or nullptr.
const char* decline_reason(const NormProblem& p, const Tensor& x) {
  if (!x.is_cuda()) return nullptr;
  if (!device_properties(x.get_device_index()).is_hopper()) return "the GPU is not a Hopper";
  constexpr int64_t kLimit = int64_t{1} << 31;
  if (p.sums == ScalarType::Double) return "float64";
  if (p.columns == 0) return "rows without elements";
  if (p.rows >= kLimit || p.groups * p.columns >= kLimit) return "2^31 rows or columns";
  return nullptr;
}

float* data_of(const OptTensor& t) { return t ? t->mutable_data_ptr<float>() : nullptr; }

// `staged`: x, and what else goes through the kernel's ring. `results`: the forward's, whose rows,
// too, may begin anywhere. `usual` and `layer`: as NormProblemSize's.
NormProblemSize size_of(const NormProblem& p, std::initializer_list<NormMatrix> staged,
                        std::initializer_list<NormMatrix> results, bool bias_sums, bool usual,
                        bool layer) {
  // Without groups nothing is launched.
  const int groups = static_cast<int>(std::max<int64_t>(p.groups, 1));
  NormProblemSize size{p.rows, p.columns, groups, {}, bias_sums, true, usual, layer};
  for (const auto& operands : {staged, results}) {
    for (const NormMatrix& m : operands) {
      size.aligned = size.aligned && is_aligned(m, p.rows, groups);
    }
  }
  int i = 0;
  for (const NormMatrix& operand : staged) {
    const bool is_there = i == 0 || operand.data != nullptr;  // without rows x's data may be null
    size.staged[i++] = is_there ? bytes_of(operand.type) : 0;
  }
  return size;
}

}  // namespace

bool norm_forward_kernel(OpPaths& paths, const NormProblem& p, const NormInputs& in,
                         const Tensor& y, const NormOutputs& out, const NormScales& scales) {
  if (!paths.takes_kernel(in.x.is_cuda(), decline_reason(p, in.x))) return false;
  const int device = in.x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  Operands operands(p, in.x);
  NormForward f{};
  f.x = operands.rows(in.x);
  f.residual = operands.rows(in.residual);
  f.weight = operands.parameter(in.weight);
  f.bias = operands.parameter(in.bias);
  f.y = operands.result(y);
  f.residual_out = operands.result(out.residual_out);
  f.mean = data_of(out.mean);
  f.rstd = data_of(out.rstd);
  f.scale = scales.given ? scales.given->const_data_ptr<float>() : nullptr;
  f.row_scales = data_of(scales.of_rows);
  f.rows = p.rows;
  f.eps = static_cast<float>(p.eps);
  f.weight_offset = static_cast<float>(p.weight_offset);
  f.layer = p.kind == NormKind::kLayer;
  const bool usual =
      !f.quantizes() && f.y.type == f.x.type && f.is_usual(static_cast<int>(p.groups));
  // Vectors of y in fp8 need less, which rows of whole vectors have.
  const NormConfig config = norm_config(
      NormPass::kForward,
      size_of(p, {f.x, f.residual}, {f.residual_out, f.quantizes() ? NormMatrix{} : f.y}, false,
              usual, f.layer),
      device_limits(device));
  paths.kernel(config);
  if (p.rows * p.groups == 0) return true;
  OptTensor counter;
  if (config.has_counter()) {
    counter = empty({1}, ScalarType::Int, in.x);
    f.counter = static_cast<uint32_t*>(counter->mutable_data_ptr());
  }
  run_norm_forward(f, config, stream);
  operands.finish();
  return true;
}

bool norm_backward_kernel(OpPaths& paths, const NormProblem& p, const NormBackwardInputs& in,
                          const NormGrads& grads) {
  if (!paths.takes_kernel(in.x.is_cuda(), decline_reason(p, in.x))) return false;
  const int device = in.x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Operands operands(p, in.x);
  NormBackward b{};
  b.x = operands.rows(in.x);
  b.grad_y = operands.rows(in.grad_y);
  b.grad_residual_out = operands.rows(in.grad_residual_out);
  b.weight = operands.parameter(in.weight);
  b.grad_x = operands.result(grads.x);
  b.grad_residual = operands.result(grads.residual);
  b.grad_weight = operands.sums(grads.weight);
  b.grad_bias = operands.sums(grads.bias);
  b.mean = operands.statistics(in.mean);
  b.rstd = operands.statistics(&in.rstd);
  b.rows = p.rows;
  b.weight_offset = static_cast<float>(p.weight_offset);
  const NormBackwardConfig config =
      norm_backward_config(size_of(p, {b.x, b.grad_y, b.grad_residual_out}, {},
                                   grads.bias.has_value(), false, in.mean != nullptr),
                           device_limits(device));
  paths.kernel(config);
  if (p.groups == 0) return true;
  const auto partials = [&](const OptTensor& grad) -> OptTensor {
    if (!grad) return std::nullopt;
    return empty({std::max<int64_t>(config.partials(), 1), p.groups, p.columns}, ScalarType::Float,
                 in.x);
  };
  const OptTensor weight_partials = partials(grads.weight), bias_partials = partials(grads.bias);
  b.weight_partials = data_of(weight_partials);
  b.bias_partials = data_of(bias_partials);
  const cudaStream_t stream = current_stream(device);
  OptTensor turns;
  if (std::max(config.rings.lead, config.whole.lead) > 0 && p.rows > 0) {
    turns = empty({1}, ScalarType::Int, in.x);
    b.turns = static_cast<uint32_t*>(turns->mutable_data_ptr());
  }
  run_norm_backward(b, config, stream);
  operands.finish();
  return true;
}

}  // namespace ikbo
