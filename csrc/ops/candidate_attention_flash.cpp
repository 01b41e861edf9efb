#include "ops/candidate_attention_flash.h"

#include "ops/operands.h"

namespace ikbo {
namespace {

using Problem = CandidateAttention;

constexpr int64_t kMaxHead = 256;
constexpr int64_t kMaxGridY = 65535;  // sequences are a dimension of flash attention's grid
constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

// Whether keys and users' sequences are the same without gaps between them.
bool covers_all_keys(const Problem& p) { return !p.flat() && !p.kv_len; }

int64_t sequences(const Problem& p) {
  return covers_all_keys(p) ? p.map.n_users + 1 : 2 * p.map.n_users + 2;
}

Tensor cat(const std::vector<Tensor>& parts) { return aten("aten::cat", "", parts, int64_t{0}); }

// a[0], a[0], a[1], a[1], ...
Tensor twice(const Tensor& a) {
  return reshape(expand(unsqueeze(a, 1), {a.size(0), 2}), {2 * a.size(0)});
}

// The ends of the sequences of query rows and of keys, int32 [sequences + 1]. Every row and key is
// in one, or its gradient would be left uninitialised: what lies between users' keys is a sequence
// without queries, and the rows without a user are the last one, without keys.
std::tuple<Tensor, Tensor> sequence_ends(const Problem& p, const Tensor& user_offsets) {
  const auto at = [&](int64_t value) {
    return full({1}, static_cast<double>(value), ScalarType::Int, p.q);
  };
  const Tensor ends = aten("aten::mul", "Tensor", user_offsets, at(p.S()));
  const Tensor all_rows = at(p.B() * p.S()), all_keys = at(p.n_keys());
  if (covers_all_keys(p)) {
    const Tensor starts =
        aten("aten::mul", "Tensor", arange(p.map.n_users + 1, p.q), at(p.k.size(1)));
    return {cat({ends, all_rows}), cat({starts, all_keys})};
  }
  // A range that leaves the tensor counts as empty.
  const KeyRanges ranges = key_ranges(p);
  const Tensor none = scalar(0, ranges.first.scalar_type(), p.q);
  const Tensor first = where(ranges.valid, ranges.first, none);
  const Tensor end = add(first, where(ranges.valid, ranges.length, none));
  Tensor borders = reshape(aten("aten::stack", "", std::vector<Tensor>{first, end}, int64_t{1}),
                           {2 * first.size(0)});
  // Offsets that decrease don't mean anything, but may not lead out of the tensor.
  borders = std::get<0>(aten<Tensors2>("aten::cummax", "", borders, int64_t{0}));
  return {cat({twice(ends), all_rows}),
          cat({at(0), cast(borders, ScalarType::Int), all_keys, all_keys})};
}

// [rows, heads, size] with `size` elements of each head, zeros behind the tensor's own.
Tensor pad_heads(const Tensor& t, int64_t size) {
  if (t.size(2) == size) {
    return t.stride(2) == 1 ? t : contiguous_copy(t);
  }
  const Tensor padded = zeros({t.size(0), t.size(1), size}, t.scalar_type(), t);
  copy_(narrow(padded, 2, 0, t.size(2)), t);
  return padded;
}

}  // namespace

const char* flash_decline_reason(const Problem& p) {
  if (!is_hopper_16_bit(p.q)) return "not a Hopper GPU, or not float16 or bfloat16";
  if (p.flat() && p.kv_len) {
    return "flat keys with kv_len, which users may share (offsets in kv_start alone say they don't)";
  }
  if (p.D() > kMaxHead || p.Dv() > kMaxHead) return "heads larger than 256";
  if (!(p.scale > 0)) return "a scale that isn't positive";
  if (p.n_keys() == 0 || p.q.numel() == 0 || p.Dv() == 0) return "nothing to attend to";
  if (p.B() > kMaxInt / p.S() || p.n_keys() > kMaxInt) return "2^31 query rows or keys";
  if (sequences(p) > kMaxGridY) return "more users than flash attention takes sequences";
  return nullptr;
}

CandidateAttentionGrads candidate_attention_flash_grads(const Problem& p, const Tensor& grad_out,
                                                        const Tensor& out, const Tensor& lse,
                                                        bool want_q, bool want_k, bool want_v) {
  const int64_t rows = p.B() * p.S(), head = (std::max(p.D(), p.Dv()) + 7) / 8 * 8;
  OptTensor order = p.map.order;
  Tensor offsets;
  if (p.map.user_offsets) {
    offsets = *p.map.user_offsets;
  } else {
    const auto [found_order, found_offsets] = grouping_of(p.map);
    order = found_order;
    offsets = found_offsets;
  }
  const auto grouped = [&](const Tensor& t) { return order ? index_select(t, 0, *order) : t; };
  const auto packed_rows = [&](const Tensor& t) {
    return pad_heads(reshape(grouped(t), {rows, p.H(), t.size(3)}), head);
  };
  const auto packed_keys = [&](const Tensor& t) {
    return pad_heads(p.flat() ? t : reshape(t, {p.n_keys(), p.Hk(), t.size(3)}), head);
  };
  const Tensor packed_lse =
      torch::stable::contiguous(reshape(transpose(grouped(lse), 0, 1), {p.H(), rows}));
  const auto [row_ends, key_ends] = sequence_ends(p, offsets);
  const int64_t most_keys = p.flat() ? p.n_keys() : p.k.size(1);
  const Tensor seed = empty({2}, ScalarType::UInt64, p.q),
               unused = empty({0}, ScalarType::UInt64, p.q);
  constexpr double kDropout = 0;
  constexpr bool kCausal = false;
  const auto [grad_q, grad_k, grad_v] = aten<Tensors3>(
      "aten::_flash_attention_backward", "", packed_rows(grad_out), packed_rows(p.q),
      packed_keys(p.k), packed_keys(p.v), packed_rows(out), packed_lse, row_ends, key_ends, rows,
      most_keys, kDropout, kCausal, seed, unused, std::optional<double>(p.scale),
      std::optional<int64_t>(), std::optional<int64_t>());
  const ScalarType dtype = p.q.scalar_type();
  CandidateAttentionGrads grads{nothing(dtype, p.q), nothing(dtype, p.q), nothing(dtype, p.q)};
  const auto unpadded = [&](const Tensor& grad, const Tensor& like) {
    return torch::stable::contiguous(
        reshape(narrow(grad, 2, 0, like.size(like.dim() - 1)), sizes_of(like)));
  };
  if (want_q) {
    grads.q = unpadded(grad_q, p.q);
    if (order) {
      const Tensor scattered = empty(sizes_of(p.q), dtype, p.q);
      aten("aten::index_copy_", "", scattered, int64_t{0}, cast(*order, ScalarType::Long), grads.q);
      grads.q = scattered;
    }
  }
  if (want_k) grads.k = unpadded(grad_k, p.k);
  if (want_v) grads.v = unpadded(grad_v, p.v);
  return grads;
}

FlashBackward flash_config(const Problem& p) { return {sequences(p)}; }

std::string to_json(const FlashBackward& config) {
  return "{\"kernel\": \"aten::_flash_attention_backward\", \"sequences\": " +
         std::to_string(config.sequences) +
         ", \"deterministic\": \"under torch.use_deterministic_algorithms(True)\"}";
}

}  // namespace ikbo
