#include "kernels/linear_compression/linear_compression.h"

#include "launch/device.h"
#include "launch/stream.h"
#include "ops/checks.h"
#include "ops/linear_compression_reference.h"
#include "ops/operands.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace ikbo {
namespace {

struct Problem {
  int64_t M, N;
  CandidateMap map;
  Activation activation;
};

// What every variant shares: the candidate side, its weight, the bias and the map.
Problem check_candidate_side(const char* op, const Tensor& e_cand, const Tensor& w_cand,
                             const OptTensor& bias, int64_t n_users, const Tensor& cand_to_user,
                             const OptTensor& user_offsets, const OptTensor& order,
                             const std::string& activation) {
  check_dim(op, "e_cand", e_cand, {"B", "Kc", "N"});
  check_floating(op, "e_cand", e_cand);
  check_dim(op, "w_cand", w_cand, {"M", "Kc"});
  check_like(op, "w_cand", w_cand, "e_cand", e_cand);
  check_size(op, "w_cand", w_cand, 1, e_cand.size(1), "e_cand.size(1)");
  if (bias) {
    check_dim(op, "bias", *bias, {"M"});
    check_size(op, "bias", *bias, 0, w_cand.size(0), "w_cand.size(0)");
    check_like(op, "bias", bias, "e_cand", e_cand);
  }
  return {
      w_cand.size(0), e_cand.size(2),
      check_candidate_map(op, cand_to_user, e_cand.size(0), n_users, user_offsets, order, e_cand),
      parse_activation(op, activation)};
}

Problem check_inputs(const char* op, const Tensor& e_cand, const Tensor& e_user,
                     const Tensor& w_cand, const Tensor& w_user, const OptTensor& bias,
                     const Tensor& cand_to_user, const OptTensor& user_offsets,
                     const OptTensor& order, const std::string& activation) {
  check_dim(op, "e_user", e_user, {"U", "Ku", "N"});
  Problem problem = check_candidate_side(op, e_cand, w_cand, bias, e_user.size(0), cand_to_user,
                                         user_offsets, order, activation);
  check_like(op, "e_user", e_user, "e_cand", e_cand);
  check_size(op, "e_user", e_user, 2, problem.N, "e_cand.size(2)");
  check_dim(op, "w_user", w_user, {"M", "Ku"});
  check_like(op, "w_user", w_user, "e_cand", e_cand);
  check_size(op, "w_user", w_user, 0, problem.M, "w_cand.size(0)");
  check_size(op, "w_user", w_user, 1, e_user.size(1), "e_user.size(1)");
  return problem;
}

Problem check_add_inputs(const char* op, const Tensor& e_cand, const Tensor& w_cand,
                         const Tensor& user_part, const OptTensor& bias, const Tensor& cand_to_user,
                         const OptTensor& user_offsets, const OptTensor& order,
                         const std::string& activation) {
  check_dim(op, "user_part", user_part, {"U", "M", "N"});
  Problem problem = check_candidate_side(op, e_cand, w_cand, bias, user_part.size(0), cand_to_user,
                                         user_offsets, order, activation);
  check_size(op, "user_part", user_part, 1, problem.M, "w_cand.size(0)");
  check_size(op, "user_part", user_part, 2, problem.N, "e_cand.size(2)");
  if (user_part.scalar_type() != ScalarType::Float) {
    check_same_dtype(op, "user_part (or float32)", user_part, "e_cand", e_cand);
  }
  check_same_device(op, "user_part", user_part, "e_cand", e_cand);
  return problem;
}

// Also checks the two tensors only a backward has.
void check_backward(const char* op, const Problem& problem, const Tensor& grad_out,
                    const Tensor& saved, const Tensor& e_cand) {
  const Sizes out_sizes{problem.map.n_candidates(), problem.M, problem.N};
  IKBO_CHECK(sizes_of(grad_out) == out_sizes, op, "expected grad_out of shape [B, M, N], got ",
             shape_text(grad_out), ".");
  check_like(op, "grad_out", grad_out, "e_cand", e_cand);
  if (problem.activation != Activation::kNone) {
    IKBO_CHECK(sizes_of(saved) == out_sizes, op,
               "expected saved (preact, or out for relu and sigmoid) of shape [B, M, N], got ",
               shape_text(saved), ".");
  }
}

Tensor allocate_out(const Problem& problem, const Tensor& e_cand) {
  return empty({problem.map.n_candidates(), problem.M, problem.N}, e_cand.scalar_type(), e_cand);
}

// The operands of a forward: users' embeddings and weight, or their product.
struct Operands {
  const Tensor& e_cand;
  const Tensor& w_cand;
  const Tensor* e_user;
  const Tensor* w_user;
  const Tensor* user_part;
  const OptTensor& bias;
};

LinearCompressionProblem candidates_of(const Operands& in, const Problem& p) {
  return {p.map.n_candidates(), p.M, p.N, in.e_cand.size(1)};
}
LinearCompressionProblem users_of(const Operands& in, const Problem& p) {
  return {p.map.n_users, p.M, p.N, in.e_user ? in.e_user->size(1) : 0};
}

// Why the kernels don't take the call, or nullptr.
const char* decline_reason(const Operands& in, const Problem& p, const Tensor& out) {
  if (!is_hopper_16_bit(in.e_cand)) return "not a Hopper GPU, or not float16 or bfloat16";
  const DeviceLimits device = device_limits(in.e_cand.get_device_index());
  if (const char* reason = linear_compression_decline_reason(candidates_of(in, p), device)) {
    return reason;
  }
  const bool has_users = in.e_user && p.map.n_users > 0;
  if (has_users) {
    if (const char* reason = linear_compression_decline_reason(users_of(in, p), device)) {
      return reason;
    }
  }
  if (!has_aligned_matrices(in.e_cand) || (has_users && !has_aligned_matrices(*in.e_user))) {
    return "embeddings whose elements don't lie side by side in rows at multiples of 16 bytes";
  }
  if (!out.is_contiguous() || !is_aligned(out)) {
    return "an out that isn't contiguous from a multiple of 16 bytes on";
  }
  return nullptr;
}

void run_kernels(OpPaths& paths, const Operands& in, const Problem& p, const Tensor& out,
                 const OptTensor& preact) {
  const int device = in.e_cand.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const LinearCompressionProblem candidates = candidates_of(in, p), users = users_of(in, p);
  LinearCompressionPlan plan =
      linear_compression_plan(candidates, users, device_limits(device)).value();
  const ScalarType dtype = in.e_cand.scalar_type();

  WeightOperands weights;
  const auto product = [&](const Tensor& w, const Tensor& e, void* result) {
    const WeightOperands::Operand weight = weights.read(w);
    LinearCompressionOperands operands{};
    operands.type = dtype == ScalarType::BFloat16 ? ElementType::kBfloat16 : ElementType::kFloat16;
    operands.w = weight.data;
    operands.w_stride = weight.row_stride;
    operands.e = e.const_data_ptr();
    // Where there is no second row or matrix, torch's strides may be anything.
    operands.e_stride = e.size(1) > 1 ? e.stride(1) : p.N;
    operands.e_row_stride = e.size(0) > 1 ? e.stride(0) : e.size(1) * operands.e_stride;
    operands.out = result;
    return operands;
  };
  LinearCompressionOperands of_candidates = product(in.w_cand, in.e_cand, out.mutable_data_ptr());
  LinearCompressionOperands of_users{};
  OptTensor part, bias;
  if (plan.users) {
    part = empty({p.map.n_users, p.M, p.N}, dtype, out);
    of_users = product(*in.w_user, *in.e_user, part->mutable_data_ptr());
    of_candidates.part_is_under_way = true;
  } else if (in.user_part) {
    // An fp32 part is rounded, as the users' product is between the two kernels.
    part = cast(*in.user_part, dtype);
    if (!part->is_contiguous() || !is_aligned(*part)) part = contiguous_copy(*part);
  }
  of_candidates.cand_to_user = p.map.cand_to_user.const_data_ptr<int32_t>();
  if (part) of_candidates.part = part->const_data_ptr();
  of_candidates.n_users = p.map.n_users;
  if (in.bias) {
    bias = in.bias->is_contiguous() ? *in.bias : contiguous_copy(*in.bias);
    of_candidates.bias = bias->const_data_ptr();
  }
  of_candidates.activation = p.activation;
  if (preact && preact->numel() > 0) of_candidates.preact = preact->mutable_data_ptr();

  plan.packed_weights = weights.packed();
  paths.kernel(plan);
  weights.pack(stream);
  if (plan.users) run_linear_compression(of_users, users, *plan.users, stream);
  run_linear_compression(of_candidates, candidates, plan.candidates, stream);
}

// Computes out, and preact where it has a size.
void compute(OpPaths& paths, const Operands& in, const Problem& p, const Tensor& out,
             const OptTensor& preact) {
  if (out.numel() == 0) return;
  if (paths.takes_kernel(in.e_cand.is_cuda(), decline_reason(in, p, out))) {
    return run_kernels(paths, in, p, out, preact);
  }
  const Tensor part =
      in.user_part ? *in.user_part : linear_compression_user_part(*in.e_user, *in.w_user);
  linear_compression_reference(in.e_cand, in.w_cand, part, in.bias, p.map, p.activation, out,
                               preact);
}

}  // namespace

void linear_compression_out(const Tensor& e_cand, const Tensor& e_user, const Tensor& w_cand,
                            const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                            const OptTensor& user_offsets, const OptTensor& order,
                            const std::string& activation, const Tensor& out) {
  constexpr const char* op = "linear_compression";
  const Problem p = check_inputs(op, e_cand, e_user, w_cand, w_user, bias, cand_to_user,
                                 user_offsets, order, activation);
  check_out(op, out, {p.map.n_candidates(), p.M, p.N}, e_cand.scalar_type(), e_cand);
  static OpPaths paths(op);
  compute(paths, {e_cand, w_cand, &e_user, &w_user, nullptr, bias}, p, out, std::nullopt);
}

Tensor linear_compression(const Tensor& e_cand, const Tensor& e_user, const Tensor& w_cand,
                          const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                          const OptTensor& user_offsets, const OptTensor& order,
                          const std::string& activation) {
  constexpr const char* op = "linear_compression";
  const Problem p = check_inputs(op, e_cand, e_user, w_cand, w_user, bias, cand_to_user,
                                 user_offsets, order, activation);
  const Tensor out = allocate_out(p, e_cand);
  static OpPaths paths(op);
  compute(paths, {e_cand, w_cand, &e_user, &w_user, nullptr, bias}, p, out, std::nullopt);
  return out;
}

Tensors2 linear_compression_fwd(const Tensor& e_cand, const Tensor& e_user, const Tensor& w_cand,
                                const Tensor& w_user, const OptTensor& bias,
                                const Tensor& cand_to_user, const OptTensor& user_offsets,
                                const OptTensor& order, const std::string& activation) {
  constexpr const char* op = "linear_compression_fwd";
  const Problem p = check_inputs(op, e_cand, e_user, w_cand, w_user, bias, cand_to_user,
                                 user_offsets, order, activation);
  const Tensor out = allocate_out(p, e_cand);
  const Tensor preact = allocate_preactivation(out, p.activation);
  static OpPaths paths(op);
  compute(paths, {e_cand, w_cand, &e_user, &w_user, nullptr, bias}, p, out, preact);
  return {out, preact};
}

Tensors5 linear_compression_bwd(const Tensor& grad_out, const Tensor& e_cand, const Tensor& e_user,
                                const Tensor& w_cand, const Tensor& w_user, const Tensor& saved,
                                const Tensor& cand_to_user, const OptTensor& user_offsets,
                                const OptTensor& order, const std::string& activation,
                                int64_t grad_mask) {
  constexpr const char* op = "linear_compression_bwd";
  const Problem p = check_inputs(op, e_cand, e_user, w_cand, w_user, std::nullopt, cand_to_user,
                                 user_offsets, order, activation);
  check_backward(op, p, grad_out, saved, e_cand);
  IKBO_RECORD_BACKWARD(op, is_hopper_16_bit(e_cand), e_cand.is_cuda());
  const ScalarType dtype = e_cand.scalar_type();
  const auto grads = linear_compression_candidate_grads(grad_out, e_cand, w_cand, saved, p.map,
                                                        p.activation, wants(grad_mask, 0),
                                                        wants(grad_mask, 2), wants(grad_mask, 4));
  Tensor grad_e_user = nothing(dtype, e_cand), grad_w_user = nothing(dtype, e_cand);
  if (wants(grad_mask, 1) || wants(grad_mask, 3)) {
    const Tensor pre = as_operand(sum_per_user(grads.preactivation, p.map), dtype);
    if (wants(grad_mask, 1)) {
      const Tensor w = expand(transpose(w_user, 0, 1), {p.map.n_users, w_user.size(1), p.M});
      grad_e_user = cast(bmm_accumulate(w, pre), dtype);
    }
    if (wants(grad_mask, 3)) {
      grad_w_user = cast(sum_of_products(pre, transpose(e_user, 1, 2), nullptr), dtype);
    }
  }
  return {grads.e_cand, grad_e_user, grads.w_cand, grad_w_user, grads.bias};
}

Tensor linear_compression_add(const Tensor& e_cand, const Tensor& w_cand, const Tensor& user_part,
                              const OptTensor& bias, const Tensor& cand_to_user,
                              const OptTensor& user_offsets, const OptTensor& order,
                              const std::string& activation) {
  constexpr const char* op = "linear_compression_add";
  const Problem p = check_add_inputs(op, e_cand, w_cand, user_part, bias, cand_to_user,
                                     user_offsets, order, activation);
  const Tensor out = allocate_out(p, e_cand);
  static OpPaths paths(op);
  compute(paths, {e_cand, w_cand, nullptr, nullptr, &user_part, bias}, p, out, std::nullopt);
  return out;
}

Tensors2 linear_compression_add_fwd(const Tensor& e_cand, const Tensor& w_cand,
                                    const Tensor& user_part, const OptTensor& bias,
                                    const Tensor& cand_to_user, const OptTensor& user_offsets,
                                    const OptTensor& order, const std::string& activation) {
  constexpr const char* op = "linear_compression_add_fwd";
  const Problem p = check_add_inputs(op, e_cand, w_cand, user_part, bias, cand_to_user,
                                     user_offsets, order, activation);
  const Tensor out = allocate_out(p, e_cand);
  const Tensor preact = allocate_preactivation(out, p.activation);
  static OpPaths paths(op);
  compute(paths, {e_cand, w_cand, nullptr, nullptr, &user_part, bias}, p, out, preact);
  return {out, preact};
}

Tensors4 linear_compression_add_bwd(const Tensor& grad_out, const Tensor& e_cand,
                                    const Tensor& w_cand, const Tensor& user_part,
                                    const Tensor& saved, const Tensor& cand_to_user,
                                    const OptTensor& user_offsets, const OptTensor& order,
                                    const std::string& activation, int64_t grad_mask) {
  constexpr const char* op = "linear_compression_add_bwd";
  const Problem p = check_add_inputs(op, e_cand, w_cand, user_part, std::nullopt, cand_to_user,
                                     user_offsets, order, activation);
  check_backward(op, p, grad_out, saved, e_cand);
  IKBO_RECORD_BACKWARD(op, is_hopper_16_bit(e_cand), e_cand.is_cuda());
  const auto grads = linear_compression_candidate_grads(grad_out, e_cand, w_cand, saved, p.map,
                                                        p.activation, wants(grad_mask, 0),
                                                        wants(grad_mask, 1), wants(grad_mask, 3));
  Tensor grad_part = nothing(user_part.scalar_type(), e_cand);
  if (wants(grad_mask, 2)) {
    grad_part = cast(sum_per_user(grads.preactivation, p.map), user_part.scalar_type());
  }
  return {grads.e_cand, grads.w_cand, grad_part, grads.bias};
}

}  // namespace ikbo
