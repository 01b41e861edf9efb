#include <cmath>

#include "ops/candidate_attention_reference.h"
#include "ops/checks.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace ikbo {
namespace {

// kv_start or kv_len: integers [U].
void check_range(const char* op, const char* name, const Tensor& t, int64_t n_users,
                 const Tensor& q) {
  const ScalarType dtype = t.scalar_type();
  IKBO_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, op, "expected ", name,
             " in int32 or int64, got ", dtype_text(dtype), ". Convert it with .to(torch.int32).");
  IKBO_CHECK(t.dim() == 1 && t.size(0) == n_users, op, "expected ", name, " of shape [U] = [",
             n_users, "], got ", shape_text(t), ".");
  check_same_device(op, name, t, "q", q);
}

// The shapes of k and v, dense or flat. Returns U.
int64_t check_keys(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                   const OptTensor& kv_start, const OptTensor& kv_len) {
  IKBO_CHECK(k.dim() == 4 || k.dim() == 3, op,
             "expected k of shape [U, L, Hk, D], or flat [T, Hk, D] with kv_start and kv_len, got ",
             shape_text(k), ".");
  const bool flat = k.dim() == 3;
  if (flat) {
    IKBO_CHECK(kv_start && kv_len, op, "expected kv_start and kv_len with flat k [T, Hk, D], got ",
               kv_start ? "kv_start alone"
               : kv_len ? "kv_len alone"
                        : "neither",
               ". Pass where each user's keys start and how many they are, int32 [U] both.");
    check_dim(op, "v", v, {"T", "Hk", "Dv"});
    check_size(op, "v", v, 0, k.size(0), "k.size(0)");
    check_size(op, "v", v, 1, k.size(1), "k.size(1)");
    check_dim(op, "kv_start", *kv_start, {"U"});
  } else {
    IKBO_CHECK(!kv_start, op,
               "expected no kv_start with dense k [U, L, Hk, D], got one. Drop it (each "
               "user's keys start at 0), or pass k and v as flat [T, Hk, D].");
    check_dim(op, "v", v, {"U", "L", "Hk", "Dv"});
    check_size(op, "v", v, 0, k.size(0), "k.size(0)");
    check_size(op, "v", v, 1, k.size(1), "k.size(1)");
    check_size(op, "v", v, 2, k.size(2), "k.size(2)");
  }
  check_size(op, "k", k, k.dim() - 1, q.size(3), "q.size(3)");
  const int64_t H = q.size(2), Hk = k.size(k.dim() - 2);
  IKBO_CHECK(Hk > 0 && H % Hk == 0, op,
             "expected q.size(2), the query heads, to be a multiple of the kv "
             "heads, got ",
             H, " query heads and ", Hk, " kv heads.");
  return flat ? kv_start->size(0) : k.size(0);
}

CandidateAttention check_inputs(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                                const OptTensor& kv_start, const OptTensor& kv_len,
                                const Tensor& cand_to_user, const OptTensor& user_offsets,
                                const OptTensor& order, std::optional<double> scale) {
  check_dim(op, "q", q, {"B", "S", "H", "D"});
  check_floating(op, "q", q);
  IKBO_CHECK(q.size(3) > 0, op, "expected q.size(3), the head dim D, to be at least 1, got ",
             shape_text(q), ".");
  const int64_t n_users = check_keys(op, q, k, v, kv_start, kv_len);
  check_like(op, "k", k, "q", q);
  check_like(op, "v", v, "q", q);
  if (kv_start) check_range(op, "kv_start", *kv_start, n_users, q);
  if (kv_len) check_range(op, "kv_len", *kv_len, n_users, q);
  return {q,
          k,
          v,
          kv_start,
          kv_len,
          check_candidate_map(op, cand_to_user, q.size(0), n_users, user_offsets, order, q),
          scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))))};
}

Sizes out_sizes(const CandidateAttention& p) { return {p.B(), p.S(), p.H(), p.Dv()}; }

Tensor allocate_out(const CandidateAttention& p) {
  return empty(out_sizes(p), p.q.scalar_type(), p.q);
}

constexpr const char* kNoKernel = "no Hopper kernel for this op";

}  // namespace

void candidate_attention_out(const Tensor& q, const Tensor& k, const Tensor& v,
                             const OptTensor& kv_start, const OptTensor& kv_len,
                             const Tensor& cand_to_user, const OptTensor& user_offsets,
                             const OptTensor& order, std::optional<double> scale,
                             const Tensor& out) {
  constexpr const char* op = "candidate_attention";
  const CandidateAttention p =
      check_inputs(op, q, k, v, kv_start, kv_len, cand_to_user, user_offsets, order, scale);
  check_out(op, out, out_sizes(p), q.scalar_type(), q);
  IKBO_RECORD_REFERENCE(op, q.is_cuda(), kNoKernel);
  candidate_attention_reference(p, out, /*want_lse=*/false);
}

Tensor candidate_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                           const OptTensor& kv_start, const OptTensor& kv_len,
                           const Tensor& cand_to_user, const OptTensor& user_offsets,
                           const OptTensor& order, std::optional<double> scale) {
  constexpr const char* op = "candidate_attention";
  const CandidateAttention p =
      check_inputs(op, q, k, v, kv_start, kv_len, cand_to_user, user_offsets, order, scale);
  const Tensor out = allocate_out(p);
  if (out.numel() == 0) return out;
  IKBO_RECORD_REFERENCE(op, q.is_cuda(), kNoKernel);
  candidate_attention_reference(p, out, /*want_lse=*/false);
  return out;
}

Tensors2 candidate_attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                 const OptTensor& kv_start, const OptTensor& kv_len,
                                 const Tensor& cand_to_user, const OptTensor& user_offsets,
                                 const OptTensor& order, std::optional<double> scale) {
  constexpr const char* op = "candidate_attention_fwd";
  const CandidateAttention p =
      check_inputs(op, q, k, v, kv_start, kv_len, cand_to_user, user_offsets, order, scale);
  const Tensor out = allocate_out(p);
  IKBO_RECORD_REFERENCE(op, q.is_cuda(), kNoKernel);
  const Tensor lse = candidate_attention_reference(p, out, /*want_lse=*/true);
  return {out, lse};
}

Tensors3 candidate_attention_bwd(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const Tensor& out, const Tensor& lse,
                                 const OptTensor& kv_start, const OptTensor& kv_len,
                                 const Tensor& cand_to_user, const OptTensor& user_offsets,
                                 const OptTensor& order, std::optional<double> scale,
                                 int64_t grad_mask) {
  constexpr const char* op = "candidate_attention_bwd";
  const CandidateAttention p =
      check_inputs(op, q, k, v, kv_start, kv_len, cand_to_user, user_offsets, order, scale);
  const auto check_saved = [&](const char* name, const Tensor& t) {
    IKBO_CHECK(sizes_of(t) == out_sizes(p), op, "expected ", name, " of shape [B, S, H, Dv], got ",
               shape_text(t), ".");
    check_like(op, name, t, "q", q);
  };
  check_saved("grad_out", grad_out);
  check_saved("out", out);
  const Sizes lse_sizes{p.B(), p.H(), p.S()};
  IKBO_CHECK(sizes_of(lse) == lse_sizes && lse.scalar_type() == p.sums(), op,
             "expected lse of shape [B, H, S] in ", dtype_text(p.sums()), ", got ", shape_text(lse),
             " in ", dtype_text(lse.scalar_type()), ".");
  check_same_device(op, "lse", lse, "q", q);
  IKBO_RECORD_REFERENCE(op, q.is_cuda(), kNoKernel);
  const auto grads = candidate_attention_grads(p, grad_out, wants(grad_mask, 0),
                                               wants(grad_mask, 1), wants(grad_mask, 2));
  return {grads.q, grads.k, grads.v};
}

}  // namespace ikbo
