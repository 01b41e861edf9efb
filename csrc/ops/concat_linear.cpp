#include "ops/checks.h"
#include "ops/concat_linear_reference.h"
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

constexpr const char* kNoKernel = "no Hopper kernel for this op";

}  // namespace

void concat_linear_out(const Tensor& x_cand, const Tensor& x_user, const Tensor& w_cand,
                       const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                       const OptTensor& user_offsets, const OptTensor& order,
                       const std::string& activation, const Tensor& out) {
  constexpr const char* op = "concat_linear";
  const Problem p = check_inputs(op, x_cand, x_user, w_cand, w_user, bias, cand_to_user,
                                 user_offsets, order, activation);
  check_out(op, out, {p.map.n_candidates(), p.N}, x_cand.scalar_type(), x_cand);
  IKBO_RECORD_REFERENCE(op, x_cand.is_cuda(), kNoKernel);
  concat_linear_reference(x_cand, w_cand, concat_linear_user_part(x_user, w_user), bias, p.map,
                          p.activation, out, std::nullopt);
}

Tensor concat_linear(const Tensor& x_cand, const Tensor& x_user, const Tensor& w_cand,
                     const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                     const OptTensor& user_offsets, const OptTensor& order,
                     const std::string& activation) {
  constexpr const char* op = "concat_linear";
  const Problem p = check_inputs(op, x_cand, x_user, w_cand, w_user, bias, cand_to_user,
                                 user_offsets, order, activation);
  const Tensor out = allocate_out(p, x_cand);
  if (out.numel() == 0) return out;
  IKBO_RECORD_REFERENCE(op, x_cand.is_cuda(), kNoKernel);
  concat_linear_reference(x_cand, w_cand, concat_linear_user_part(x_user, w_user), bias, p.map,
                          p.activation, out, std::nullopt);
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
  IKBO_RECORD_REFERENCE(op, x_cand.is_cuda(), kNoKernel);
  concat_linear_reference(x_cand, w_cand, concat_linear_user_part(x_user, w_user), bias, p.map,
                          p.activation, out, preact);
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
  IKBO_RECORD_REFERENCE(op, x_cand.is_cuda(), kNoKernel);
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
  IKBO_RECORD_REFERENCE(op, x_cand.is_cuda(), kNoKernel);
  concat_linear_reference(x_cand, w_cand, user_part, bias, p.map, p.activation, out, std::nullopt);
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
  IKBO_RECORD_REFERENCE(op, x_cand.is_cuda(), kNoKernel);
  concat_linear_reference(x_cand, w_cand, user_part, bias, p.map, p.activation, out, preact);
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
  IKBO_RECORD_REFERENCE(op, x_cand.is_cuda(), kNoKernel);
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
