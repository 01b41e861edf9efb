#include "kernels/candidate_attention/candidate_attention.h"

#include <cmath>

#include "launch/stream.h"
#include "ops/candidate_attention_flash.h"
#include "ops/candidate_attention_reference.h"
#include "ops/checks.h"
#include "ops/operands.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace ikbo {
namespace {

// kv_start or kv_len: integers [U], or offsets [U + 1].
void check_range(const char* op, const char* name, const Tensor& t, int64_t size,
                 const char* meaning, const Tensor& q) {
  const ScalarType dtype = t.scalar_type();
  IKBO_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, op, "expected ", name,
             " in int32 or int64, got ", dtype_text(dtype), ". Convert it with .to(torch.int32).");
  IKBO_CHECK(t.dim() == 1 && t.size(0) == size, op, "expected ", name, " of shape ", meaning,
             " = [", size, "], got ", shape_text(t), ".");
  check_same_device(op, name, t, "q", q);
}

// The shapes of k and v, dense or flat. Returns U.
int64_t check_keys(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                   const OptTensor& kv_start, const OptTensor& kv_len) {
  IKBO_CHECK(k.dim() == 4 || k.dim() == 3, op,
             "expected k of shape [U, L, Hk, D], or flat [T, Hk, D] with kv_start, got ",
             shape_text(k), ".");
  const bool flat = k.dim() == 3;
  if (flat) {
    IKBO_CHECK(
        kv_start, op, "expected kv_start with flat k [T, Hk, D], got ",
        kv_len ? "kv_len alone" : "neither it nor kv_len",
        ". Pass where each user's keys start and how many they are, [U] both, or as kv_start "
        "alone the offsets [U + 1] of keys that lie one user's after the other's.");
    check_dim(op, "v", v, {"T", "Hk", "Dv"});
    check_size(op, "v", v, 0, k.size(0), "k.size(0)");
    check_size(op, "v", v, 1, k.size(1), "k.size(1)");
    check_dim(op, "kv_start", *kv_start, {kv_len ? "U" : "U + 1"});
    IKBO_CHECK(kv_len || kv_start->size(0) > 0, op,
               "expected offsets kv_start [U + 1], got none at all. Pass [0] for no user.");
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
  if (!flat) return k.size(0);
  return kv_len ? kv_start->size(0) : kv_start->size(0) - 1;
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
  if (kv_start && kv_len) check_range(op, "kv_start", *kv_start, n_users, "[U]", q);
  if (kv_start && !kv_len) check_range(op, "kv_start", *kv_start, n_users + 1, "[U + 1]", q);
  if (kv_len) check_range(op, "kv_len", *kv_len, n_users, "[U]", q);
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

AttentionProblem kernel_problem(const CandidateAttention& p) {
  // Of flat keys only the mean length is known here.
  const int64_t users = std::max<int64_t>(p.map.n_users, 1);
  const int64_t L = p.flat() ? p.n_keys() / users : p.k.size(1);
  const bool is_ordered = p.map.order || !p.map.user_offsets;
  return {p.B(),     p.S(),         p.H(), p.D(),
          p.Dv(),    p.map.n_users, L,     p.flat() || p.kv_len.has_value(),
          is_ordered};
}

// Whether the copy engine takes a tensor's heads: elements side by side, all strides of dimensions
// that have any a multiple of 16 bytes, none of them 0.
bool has_aligned_heads(const Tensor& t) {
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    if (t.size(dim) <= 1) continue;
    const bool fits =
        dim + 1 == t.dim() ? t.stride(dim) == 1 : t.stride(dim) > 0 && t.stride(dim) % 8 == 0;
    if (!fits) return false;
  }
  return is_aligned(t);
}

// Whether the rows of all candidates are evenly apart.
bool has_one_row_stride(const Tensor& q) {
  return q.size(0) <= 1 || q.size(1) <= 1 || q.stride(0) == q.size(1) * q.stride(1);
}

// A dimension's stride; where there is no second element, torch's may be anything.
int64_t stride_or(const Tensor& t, int64_t dim, int64_t fallback) {
  return t.size(dim) > 1 ? t.stride(dim) : fallback;
}

// Why the kernels don't take the call, or nullptr.
const char* decline_reason(const CandidateAttention& p, const Tensor& out) {
  if (!is_hopper_16_bit(p.q)) return "not a Hopper GPU, or not float16 or bfloat16";
  const DeviceLimits device = device_limits(p.q.get_device_index());
  if (const char* reason = attention_decline_reason(kernel_problem(p), device)) return reason;
  if (p.n_keys() == 0) return "no keys at all";
  if (p.n_keys() > std::numeric_limits<int32_t>::max()) return "2^31 keys or more";
  if (!has_aligned_heads(p.k) || !has_aligned_heads(p.v)) {
    return "k or v whose heads don't lie side by side at multiples of 16 bytes";
  }
  if (!out.is_contiguous() || !is_aligned(out)) {
    return "an out that isn't contiguous from a multiple of 16 bytes on";
  }
  return nullptr;
}

// kv_start or kv_len in int32; values that it can't hold stay out of range.
OptTensor as_int32(const OptTensor& t) {
  if (!t || t->scalar_type() == ScalarType::Int) {
    return t && !t->is_contiguous() ? OptTensor(contiguous_copy(*t)) : t;
  }
  const Tensor low = scalar(-1, ScalarType::Long, *t);
  const Tensor high = scalar(std::numeric_limits<int32_t>::max(), ScalarType::Long, *t);
  return cast(aten("aten::minimum", "", aten("aten::maximum", "", *t, low), high), ScalarType::Int);
}

// lse has size 0 where it isn't asked for.
void run_kernels(OpPaths& paths, const CandidateAttention& p, const Tensor& out,
                 const Tensor& lse) {
  const int device = p.q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  OptTensor order = p.map.order, offsets = p.map.user_offsets;
  if (!offsets) {
    const auto [found_order, found_offsets] = grouping_of(p.map);
    order = found_order;
    offsets = found_offsets;
  }
  if (order && !order->is_contiguous()) order = contiguous_copy(*order);
  const AttentionConfig config = attention_config(kernel_problem(p), device_limits(device));
  const Tensor q = has_aligned_heads(p.q) && has_one_row_stride(p.q) ? p.q : contiguous_copy(p.q);
  const Tensor starts_at_offsets = offsets->is_contiguous() ? *offsets : contiguous_copy(*offsets);
  const OptTensor kv_start = as_int32(p.kv_start), kv_len = as_int32(p.kv_len);
  const Tensor& map = p.map.cand_to_user;
  const Tensor users = map.is_contiguous() ? map : contiguous_copy(map);

  AttentionOperands o{};
  o.type = q.scalar_type() == ScalarType::BFloat16 ? ElementType::kBfloat16 : ElementType::kFloat16;
  o.B = p.B(), o.S = p.S(), o.H = p.H(), o.Hk = p.Hk(), o.D = p.D(), o.Dv = p.Dv();
  o.U = p.map.n_users;
  o.q = q.const_data_ptr();
  o.q_head_stride = stride_or(q, 2, p.D());
  const int64_t row_stride = stride_or(q, 0, p.S() * p.H() * p.D()) / p.S();
  o.q_row_stride = stride_or(q, 1, row_stride);
  const auto keys = [&](const Tensor& t, int64_t head_size, const void*& data, int64_t& batch,
                        int64_t& row, int64_t& head) {
    const int64_t rows = t.dim() - 3;
    data = t.const_data_ptr();
    head = stride_or(t, rows + 1, head_size);
    row = stride_or(t, rows, p.Hk() * head);
    batch = p.flat() ? t.size(0) * row : stride_or(t, 0, t.size(1) * row);
  };
  keys(p.k, p.D(), o.k, o.k_batch_stride, o.k_row_stride, o.k_head_stride);
  keys(p.v, p.Dv(), o.v, o.v_batch_stride, o.v_row_stride, o.v_head_stride);
  o.kv_batches = p.flat() ? 1 : p.k.size(0);
  o.kv_rows = p.flat() ? p.k.size(0) : p.k.size(1);
  o.cand_to_user = users.const_data_ptr<int32_t>();
  if (order) o.order = order->const_data_ptr<int32_t>();
  o.user_offsets = starts_at_offsets.const_data_ptr<int32_t>();
  if (kv_start) o.kv_start = kv_start->const_data_ptr<int32_t>();
  if (kv_len) o.kv_len = kv_len->const_data_ptr<int32_t>();
  o.out = out.mutable_data_ptr();
  if (lse.numel() > 0) o.lse = lse.mutable_data_ptr<float>();
  o.scale = static_cast<float>(p.scale);
  OptTensor ticket, kept;
  if (config.tickets) {
    ticket = empty({1}, ScalarType::Int, out);
    o.ticket = reinterpret_cast<uint32_t*>(ticket->mutable_data_ptr<int32_t>());
  }
  if (const int64_t bytes = attention_kept_bytes(config); bytes > 0) {
    kept = empty({bytes}, ScalarType::Byte, out);
    o.kept = kept->mutable_data_ptr();
  }
  paths.kernel(config);
  run_candidate_attention(o, config, current_stream(device));
}

// Writes out; returns lse where asked for, else a tensor of size 0.
Tensor compute(OpPaths& paths, const CandidateAttention& p, const Tensor& out, bool wants_lse) {
  if (out.numel() == 0 || !paths.takes_kernel(p.q.is_cuda(), decline_reason(p, out))) {
    return candidate_attention_reference(p, out, wants_lse);
  }
  const Tensor lse =
      wants_lse ? empty({p.B(), p.H(), p.S()}, p.sums(), p.q) : nothing(p.sums(), p.q);
  run_kernels(paths, p, out, lse);
  return lse;
}

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
  static OpPaths paths(op);
  compute(paths, p, out, /*wants_lse=*/false);
}

Tensor candidate_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                           const OptTensor& kv_start, const OptTensor& kv_len,
                           const Tensor& cand_to_user, const OptTensor& user_offsets,
                           const OptTensor& order, std::optional<double> scale) {
  constexpr const char* op = "candidate_attention";
  const CandidateAttention p =
      check_inputs(op, q, k, v, kv_start, kv_len, cand_to_user, user_offsets, order, scale);
  const Tensor out = allocate_out(p);
  static OpPaths paths(op);
  if (out.numel() > 0) compute(paths, p, out, /*wants_lse=*/false);
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
  static OpPaths paths(op);
  const Tensor lse = compute(paths, p, out, /*wants_lse=*/true);
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
  static OpPaths paths(op, "library");
  const bool q_grad = wants(grad_mask, 0), k_grad = wants(grad_mask, 1),
             v_grad = wants(grad_mask, 2);
  CandidateAttentionGrads grads;
  if (paths.takes_kernel(q.is_cuda(), flash_decline_reason(p))) {
    paths.kernel(flash_config(p));
    grads = candidate_attention_flash_grads(p, grad_out, out, lse, q_grad, k_grad, v_grad);
  } else {
    grads = candidate_attention_grads(p, grad_out, q_grad, k_grad, v_grad);
  }
  return {grads.q, grads.k, grads.v};
}

}  // namespace ikbo
