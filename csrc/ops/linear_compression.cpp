#include "ops/checks.h"
#include "ops/linear_compression_reference.h"
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

constexpr const char* kNoKernel = "no Hopper kernel for this op";

}  // namespace

void linear_compression_out(const Tensor& e_cand, const Tensor& e_user, const Tensor& w_cand,
                            const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                            const OptTensor& user_offsets, const OptTensor& order,
                            const std::string& activation, const Tensor& out) {
  constexpr const char* op = "linear_compression";
  const Problem p = check_inputs(op, e_cand, e_user, w_cand, w_user, bias, cand_to_user,
                                 user_offsets, order, activation);
  check_out(op, out, {p.map.n_candidates(), p.M, p.N}, e_cand.scalar_type(), e_cand);
  IKBO_RECORD_REFERENCE(op, e_cand.is_cuda(), kNoKernel);
  linear_compression_reference(e_cand, w_cand, linear_compression_user_part(e_user, w_user), bias,
                               p.map, p.activation, out, std::nullopt);
}

Tensor linear_compression(const Tensor& e_cand, const Tensor& e_user, const Tensor& w_cand,
                          const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                          const OptTensor& user_offsets, const OptTensor& order,
                          const std::string& activation) {
  constexpr const char* op = "linear_compression";
  const Problem p = check_inputs(op, e_cand, e_user, w_cand, w_user, bias, cand_to_user,
                                 user_offsets, order, activation);
  const Tensor out = allocate_out(p, e_cand);
  if (out.numel() == 0) return out;
  IKBO_RECORD_REFERENCE(op, e_cand.is_cuda(), kNoKernel);
  linear_compression_reference(e_cand, w_cand, linear_compression_user_part(e_user, w_user), bias,
                               p.map, p.activation, out, std::nullopt);
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
  IKBO_RECORD_REFERENCE(op, e_cand.is_cuda(), kNoKernel);
  linear_compression_reference(e_cand, w_cand, linear_compression_user_part(e_user, w_user), bias,
                               p.map, p.activation, out, preact);
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
  IKBO_RECORD_REFERENCE(op, e_cand.is_cuda(), kNoKernel);
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
  IKBO_RECORD_REFERENCE(op, e_cand.is_cuda(), kNoKernel);
  linear_compression_reference(e_cand, w_cand, user_part, bias, p.map, p.activation, out,
                               std::nullopt);
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
  IKBO_RECORD_REFERENCE(op, e_cand.is_cuda(), kNoKernel);
  linear_compression_reference(e_cand, w_cand, user_part, bias, p.map, p.activation, out, preact);
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
  IKBO_RECORD_REFERENCE(op, e_cand.is_cuda(), kNoKernel);
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
