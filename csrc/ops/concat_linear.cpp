#include "kernels/concat_linear/concat_linear.h"

#include "launch/device.h"
#include "launch/stream.h"
#include "ops/checks.h"
#include "ops/concat_linear_reference.h"
#include "ops/operands.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace ikbo {
namespace {

struct Problem {
  int64_t N;
  CandidateMap map;
  Activation activation;
};

// What every variant shares: the candidate side, its weight, the bias and the map.
Problem check_candidate_side(const char* op, const Tensor& x_cand, const Tensor& w_cand,
                             const OptTensor& bias, int64_t n_users, const Tensor& cand_to_user,
                             const OptTensor& user_offsets, const OptTensor& order,
                             const std::string& activation) {
  check_dim(op, "x_cand", x_cand, {"B", "Kc"});
  check_floating(op, "x_cand", x_cand);
  check_dim(op, "w_cand", w_cand, {"N", "Kc"});
  check_like(op, "w_cand", w_cand, "x_cand", x_cand);
  check_size(op, "w_cand", w_cand, 1, x_cand.size(1), "x_cand.size(1)");
  if (bias) {
    check_dim(op, "bias", *bias, {"N"});
    check_size(op, "bias", *bias, 0, w_cand.size(0), "w_cand.size(0)");
    check_like(op, "bias", bias, "x_cand", x_cand);
  }
  return {
      w_cand.size(0),
      check_candidate_map(op, cand_to_user, x_cand.size(0), n_users, user_offsets, order, x_cand),
      parse_activation(op, activation)};
}

Problem check_inputs(const char* op, const Tensor& x_cand, const Tensor& x_user,
                     const Tensor& w_cand, const Tensor& w_user, const OptTensor& bias,
                     const Tensor& cand_to_user, const OptTensor& user_offsets,
                     const OptTensor& order, const std::string& activation) {
  check_dim(op, "x_user", x_user, {"U", "Ku"});
  Problem problem = check_candidate_side(op, x_cand, w_cand, bias, x_user.size(0), cand_to_user,
                                         user_offsets, order, activation);
  check_like(op, "x_user", x_user, "x_cand", x_cand);
  check_dim(op, "w_user", w_user, {"N", "Ku"});
  check_like(op, "w_user", w_user, "x_cand", x_cand);
  check_size(op, "w_user", w_user, 0, problem.N, "w_cand.size(0)");
  check_size(op, "w_user", w_user, 1, x_user.size(1), "x_user.size(1)");
  return problem;
}

Problem check_add_inputs(const char* op, const Tensor& x_cand, const Tensor& w_cand,
                         const Tensor& user_part, const OptTensor& bias, const Tensor& cand_to_user,
                         const OptTensor& user_offsets, const OptTensor& order,
                         const std::string& activation) {
  check_dim(op, "user_part", user_part, {"U", "N"});
  Problem problem = check_candidate_side(op, x_cand, w_cand, bias, user_part.size(0), cand_to_user,
                                         user_offsets, order, activation);
  check_size(op, "user_part", user_part, 1, problem.N, "w_cand.size(0)");
  if (user_part.scalar_type() != ScalarType::Float) {
    check_same_dtype(op, "user_part (or float32)", user_part, "x_cand", x_cand);
  }
  check_same_device(op, "user_part", user_part, "x_cand", x_cand);
  return problem;
}

// Also checks the two tensors only a backward has.
void check_backward(const char* op, const Problem& problem, const Tensor& grad_out,
                    const Tensor& saved, const Tensor& x_cand) {
  const Sizes out_sizes{problem.map.n_candidates(), problem.N};
  IKBO_CHECK(sizes_of(grad_out) == out_sizes, op, "expected grad_out of shape [B, N], got ",
             shape_text(grad_out), ".");
  check_like(op, "grad_out", grad_out, "x_cand", x_cand);
  if (problem.activation != Activation::kNone) {
    IKBO_CHECK(sizes_of(saved) == out_sizes, op,
               "expected saved (preact, or out for relu and sigmoid) of shape [B, N], got ",
               shape_text(saved), ".");
  }
}

Tensor allocate_out(const Problem& problem, const Tensor& x_cand) {
  return empty({problem.map.n_candidates(), problem.N}, x_cand.scalar_type(), x_cand);
}

// The operands of a forward: users' features and weight, or their product.
struct Operands {
  const Tensor& x_cand;
  const Tensor& w_cand;
  const Tensor* x_user;
  const Tensor* w_user;
  const Tensor* user_part;
  const OptTensor& bias;
};

ConcatLinearProblem kernel_problem(const Operands& in, const Problem& p) {
  return {p.map.n_candidates(), p.map.n_users, p.N, in.x_cand.size(1),
          in.x_user ? in.x_user->size(1) : 0};
}

// Why the kernels don't take the call, or nullptr.
const char* decline_reason(const Operands& in, const Problem& p, const Tensor& out) {
  if (!is_hopper_16_bit(in.x_cand)) return "not a Hopper GPU, or not float16 or bfloat16";
  const DeviceLimits device = device_limits(in.x_cand.get_device_index());
  if (const char* reason = concat_linear_decline_reason(kernel_problem(in, p), device)) {
    return reason;
  }
  if (!has_aligned_rows(in.x_cand) ||
      (in.x_user && in.x_user->numel() > 0 && !has_aligned_rows(*in.x_user))) {
    return "features whose elements don't lie side by side in rows at multiples of 16 bytes";
  }
  if (!has_aligned_rows(out)) {
    return "an out whose elements don't lie side by side in rows at multiples of 16 bytes";
  }
  return nullptr;
}

// A given part as the kernel gathers it.
Tensor readable_part(const Tensor& part) {
  const bool is_float = part.scalar_type() == ScalarType::Float;
  const bool fits =
      is_float ? part.stride(1) == 1 && part.stride(0) % 2 == 0 &&
                     reinterpret_cast<uintptr_t>(part.const_data_ptr()) % 8 == 0
               : has_aligned_rows(part) && part.size(0) * part.stride(0) < kMaxPartElements;
  return fits ? part : contiguous_copy(part);
}

void run_kernels(OpPaths& paths, const Operands& in, const Problem& p, const Tensor& out,
                 const OptTensor& preact) {
  const int device = in.x_cand.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const ConcatLinearProblem problem = kernel_problem(in, p);
  ConcatLinearConfig config = concat_linear_config(problem, device_limits(device));
  const ScalarType dtype = in.x_cand.scalar_type();

  ConcatLinearParams params{};
  WeightOperands weights;
  const auto matrix = [](const WeightOperands::Operand& operand) {
    return ConcatLinearParams::Matrix{operand.data, operand.row_stride};
  };
  params.is_bfloat16 = dtype == ScalarType::BFloat16;
  params.x_cand = {in.x_cand.const_data_ptr(), aligned_row_stride(in.x_cand)};
  params.w_cand = matrix(weights.read(in.w_cand));
  OptTensor part, bias;
  if (config.waits_for_users()) {
    params.x_user = {in.x_user->const_data_ptr(), aligned_row_stride(*in.x_user)};
    params.w_user = matrix(weights.read(*in.w_user));
    part = empty({problem.U, problem.N}, dtype, out);
    params.product = part->mutable_data_ptr();
  } else if (in.user_part) {
    part = readable_part(*in.user_part);
    params.part_is_float = part->scalar_type() == ScalarType::Float;
  }
  if (part) params.part = {part->const_data_ptr(), aligned_row_stride(*part)};
  if (in.bias) {
    bias = as_kernels_read(*in.bias);
    params.bias = bias->const_data_ptr();
  }
  params.cand_to_user = p.map.cand_to_user.const_data_ptr<int32_t>();
  params.out = out.mutable_data_ptr();
  params.out_stride = aligned_row_stride(out);
  if (preact && preact->numel() > 0) params.preact = preact->mutable_data_ptr();
  params.activation = p.activation;

  config.packed_weights = weights.packed();
  paths.kernel(config);
  weights.pack(stream);
  run_concat_linear(params, problem, config, stream);
}

// Computes out, and preact where it has a size.
void compute(OpPaths& paths, const Operands& in, const Problem& p, const Tensor& out,
             const OptTensor& preact) {
  if (out.numel() == 0) return;
  if (paths.takes_kernel(in.x_cand.is_cuda(), decline_reason(in, p, out))) {
    return run_kernels(paths, in, p, out, preact);
  }
  const Tensor part =
      in.user_part ? *in.user_part : concat_linear_user_part(*in.x_user, *in.w_user);
  concat_linear_reference(in.x_cand, in.w_cand, part, in.bias, p.map, p.activation, out, preact);
}

}  // namespace

void concat_linear_out(const Tensor& x_cand, const Tensor& x_user, const Tensor& w_cand,
                       const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                       const OptTensor& user_offsets, const OptTensor& order,
                       const std::string& activation, const Tensor& out) {
  constexpr const char* op = "concat_linear";
  const Problem p = check_inputs(op, x_cand, x_user, w_cand, w_user, bias, cand_to_user,
                                 user_offsets, order, activation);
  check_out(op, out, {p.map.n_candidates(), p.N}, x_cand.scalar_type(), x_cand);
  static OpPaths paths(op);
  compute(paths, {x_cand, w_cand, &x_user, &w_user, nullptr, bias}, p, out, std::nullopt);
}

Tensor concat_linear(const Tensor& x_cand, const Tensor& x_user, const Tensor& w_cand,
                     const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                     const OptTensor& user_offsets, const OptTensor& order,
                     const std::string& activation) {
  constexpr const char* op = "concat_linear";
  const Problem p = check_inputs(op, x_cand, x_user, w_cand, w_user, bias, cand_to_user,
                                 user_offsets, order, activation);
  const Tensor out = allocate_out(p, x_cand);
  static OpPaths paths(op);
  compute(paths, {x_cand, w_cand, &x_user, &w_user, nullptr, bias}, p, out, std::nullopt);
  return out;
}

Tensors2 concat_linear_fwd(const Tensor& x_cand, const Tensor& x_user, const Tensor& w_cand,
                           const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                           const OptTensor& user_offsets, const OptTensor& order,
                           const std::string& activation) {
  constexpr const char* op = "concat_linear_fwd";
  const Problem p = check_inputs(op, x_cand, x_user, w_cand, w_user, bias, cand_to_user,
                                 user_offsets, order, activation);
  const Tensor out = allocate_out(p, x_cand);
  const Tensor preact = allocate_preactivation(out, p.activation);
  static OpPaths paths(op);
  compute(paths, {x_cand, w_cand, &x_user, &w_user, nullptr, bias}, p, out, preact);
  return {out, preact};
}

Tensors5 concat_linear_bwd(const Tensor& grad_out, const Tensor& x_cand, const Tensor& x_user,
                           const Tensor& w_cand, const Tensor& w_user, const Tensor& saved,
                           const Tensor& cand_to_user, const OptTensor& user_offsets,
                           const OptTensor& order, const std::string& activation,
                           int64_t grad_mask) {
  constexpr const char* op = "concat_linear_bwd";
  const Problem p = check_inputs(op, x_cand, x_user, w_cand, w_user, std::nullopt, cand_to_user,
                                 user_offsets, order, activation);
  check_backward(op, p, grad_out, saved, x_cand);
  IKBO_RECORD_BACKWARD(op, is_hopper_16_bit(x_cand), x_cand.is_cuda());
  const ScalarType dtype = x_cand.scalar_type();
  const auto grads =
      concat_linear_candidate_grads(grad_out, x_cand, w_cand, saved, p.map, p.activation,
                                    wants(grad_mask, 0), wants(grad_mask, 2), wants(grad_mask, 4));
  Tensor grad_x_user = nothing(dtype, x_cand), grad_w_user = nothing(dtype, x_cand);
  if (wants(grad_mask, 1) || wants(grad_mask, 3)) {
    const Tensor pre = as_operand(sum_per_user(grads.preactivation, p.map), dtype);
    if (wants(grad_mask, 1)) grad_x_user = cast(mm_accumulate(pre, w_user), dtype);
    if (wants(grad_mask, 3)) {
      grad_w_user = cast(mm_accumulate(transpose(pre, 0, 1), x_user), dtype);
    }
  }
  return {grads.x_cand, grad_x_user, grads.w_cand, grad_w_user, grads.bias};
}

Tensor concat_linear_add(const Tensor& x_cand, const Tensor& w_cand, const Tensor& user_part,
                         const OptTensor& bias, const Tensor& cand_to_user,
                         const OptTensor& user_offsets, const OptTensor& order,
                         const std::string& activation) {
  constexpr const char* op = "concat_linear_add";
  const Problem p = check_add_inputs(op, x_cand, w_cand, user_part, bias, cand_to_user,
                                     user_offsets, order, activation);
  const Tensor out = allocate_out(p, x_cand);
  static OpPaths paths(op);
  compute(paths, {x_cand, w_cand, nullptr, nullptr, &user_part, bias}, p, out, std::nullopt);
  return out;
}

Tensors2 concat_linear_add_fwd(const Tensor& x_cand, const Tensor& w_cand, const Tensor& user_part,
                               const OptTensor& bias, const Tensor& cand_to_user,
                               const OptTensor& user_offsets, const OptTensor& order,
                               const std::string& activation) {
  constexpr const char* op = "concat_linear_add_fwd";
  const Problem p = check_add_inputs(op, x_cand, w_cand, user_part, bias, cand_to_user,
                                     user_offsets, order, activation);
  const Tensor out = allocate_out(p, x_cand);
  const Tensor preact = allocate_preactivation(out, p.activation);
  static OpPaths paths(op);
  compute(paths, {x_cand, w_cand, nullptr, nullptr, &user_part, bias}, p, out, preact);
  return {out, preact};
}

Tensors4 concat_linear_add_bwd(const Tensor& grad_out, const Tensor& x_cand, const Tensor& w_cand,
                               const Tensor& user_part, const Tensor& saved,
                               const Tensor& cand_to_user, const OptTensor& user_offsets,
                               const OptTensor& order, const std::string& activation,
                               int64_t grad_mask) {
  constexpr const char* op = "concat_linear_add_bwd";
  const Problem p = check_add_inputs(op, x_cand, w_cand, user_part, std::nullopt, cand_to_user,
                                     user_offsets, order, activation);
  check_backward(op, p, grad_out, saved, x_cand);
  IKBO_RECORD_BACKWARD(op, is_hopper_16_bit(x_cand), x_cand.is_cuda());
  const auto grads =
      concat_linear_candidate_grads(grad_out, x_cand, w_cand, saved, p.map, p.activation,
                                    wants(grad_mask, 0), wants(grad_mask, 1), wants(grad_mask, 3));
  Tensor grad_part = nothing(user_part.scalar_type(), x_cand);
  if (wants(grad_mask, 2)) {
    grad_part = cast(sum_per_user(grads.preactivation, p.map), user_part.scalar_type());
  }
  return {grads.x_cand, grads.w_cand, grad_part, grads.bias};
}

}  // namespace ikbo
