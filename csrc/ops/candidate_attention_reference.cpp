// Attention as plain products, block by block: some query rows against some keys. Two ways to cut
// the work into blocks share the mathematics.
// On the CPU, a block is query rows of one user against that user's keys. On a GPU, where lengths
// aren't known without waiting for the device, it is consecutive query rows against the keys of all
// users under a mask: U times the work, so this is the slow path there.
#include "ops/candidate_attention_reference.h"

#include "ops/group_candidates_reference.h"
#include "ops/user_join_reference.h"

namespace ikbo {
namespace {

using Problem = CandidateAttention;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Positions among all keys. In fp64, which is exact below 2^53, where the stable ABI can add.
constexpr ScalarType kPosition = ScalarType::Double;

// The same for each of the B * S query rows. Rows with nothing to compute have length 0; `fill`
// (accumulation type) is NaN where the result is, and 0 elsewhere.
struct QueryRows {
  Tensor first, length, fill;
};

struct Block {
  Tensor rows;        // int64 [n], which of the B * S query rows
  int64_t first_key;  // which keys of all
  Tensor k, v;        // [Hk, T, D], [Hk, T, Dv]
  OptTensor mask;     // bool [n * H / Hk, T], what each row attends to; absent where it is all T
};

Tensor ge(const Tensor& a, const Tensor& b) { return aten("aten::ge", "Tensor", a, b); }
Tensor lt(const Tensor& a, const Tensor& b) { return aten("aten::lt", "Tensor", a, b); }
Tensor logical_and(const Tensor& a, const Tensor& b) { return aten("aten::logical_and", "", a, b); }
Tensor logical_not(const Tensor& a) { return aten("aten::logical_not", "", a); }

QueryRows query_rows(const Problem& p, const KeyRanges& ranges) {
  const UserRows users = user_rows(p.map);
  Tensor attends = index_select(ranges.valid, 0, users.index);
  Tensor fill =
      where(attends, scalar(0, ScalarType::Float, p.q), scalar(kNan, ScalarType::Float, p.q));
  if (users.has_user) {
    attends = logical_and(attends, *users.has_user);
    fill = where(*users.has_user, fill, *users.fill);
  }
  const Tensor length =
      where(attends, index_select(ranges.length, 0, users.index), scalar(0, kPosition, p.q));
  const auto each_row = [&](const Tensor& per_candidate) {
    return reshape(expand(unsqueeze(per_candidate, 1), {p.B(), p.S()}), {p.B() * p.S()});
  };
  return {each_row(index_select(ranges.first, 0, users.index)), each_row(length),
          each_row(cast(fill, p.sums()))};
}

// What a query row adds to a block's temporaries: its scores with what is made of them, and copies
// of the row itself.
int64_t row_bytes(const Problem& p, int64_t keys) {
  constexpr int64_t kScoreCopies = 4;
  return p.H() * (kScoreCopies * keys + p.D() + p.Dv()) * (p.sums() == ScalarType::Double ? 8 : 4);
}

template <class Body>
void for_each_block_by_user(const Problem& p, const KeyRanges& ranges, const Body& body) {
  const auto [order, offsets] = group_candidates_reference(p.map.cand_to_user, p.map.n_users);
  const int32_t* candidate = order.const_data_ptr<int32_t>();
  const int32_t* offset = offsets.const_data_ptr<int32_t>();
  const double* first = ranges.first.const_data_ptr<double>();
  const double* length = ranges.length.const_data_ptr<double>();
  const bool* valid = ranges.valid.const_data_ptr<bool>();
  for (int64_t u = 0; u < p.map.n_users; ++u) {
    const int64_t n_rows = (offset[u + 1] - offset[u]) * p.S();
    if (n_rows == 0 || !valid[u] || length[u] == 0) continue;
    const auto first_key = static_cast<int64_t>(first[u]), keys = static_cast<int64_t>(length[u]);
    const auto own_keys = [&](const Tensor& t) {
      const Tensor own = p.flat() ? narrow(t, 0, first_key, keys)
                                  : narrow(torch::stable::select(t, 0, u), 0, 0, keys);
      return cast(transpose(own, 0, 1), p.sums());
    };
    const Tensor k = own_keys(p.k), v = own_keys(p.v);
    for_each_slice(p.q, n_rows, row_bytes(p, keys), [&](int64_t first_row, int64_t count) {
      Tensor rows = empty({count}, ScalarType::Long, p.q);
      int64_t* row = rows.mutable_data_ptr<int64_t>();
      for (int64_t i = 0; i < count; ++i) {
        const int64_t j = first_row + i;
        row[i] = candidate[offset[u] + j / p.S()] * p.S() + j % p.S();
      }
      body(Block{rows, first_key, k, v, std::nullopt});
    });
  }
}

template <class Body>
void for_each_block_under_mask(const Problem& p, const QueryRows& rows, const Body& body) {
  const int64_t keys = p.n_keys(), group = p.H() / p.Hk();
  if (keys == 0) return;
  const auto all_keys = [&](const Tensor& t) {
    return transpose(reshape(t, {keys, p.Hk(), t.size(t.dim() - 1)}), 0, 1);
  };
  const Tensor k = all_keys(p.k), v = all_keys(p.v);
  const Tensor key = cast(arange(keys, p.q, ScalarType::Long), kPosition);
  const Tensor index = arange(p.B() * p.S(), p.q, ScalarType::Long);
  for_each_slice(p.q, p.B() * p.S(), row_bytes(p, keys), [&](int64_t first, int64_t count) {
    const auto each_head = [&](const Tensor& per_row) {
      const Tensor column = unsqueeze(narrow(per_row, 0, first, count), 1);
      return reshape(expand(column, {count, group}), {count * group, 1});
    };
    const Tensor start = each_head(rows.first);
    const Tensor end = add(start, each_head(rows.length));
    body(Block{narrow(index, 0, first, count), 0, k, v, logical_and(ge(key, start), lt(key, end))});
  });
}

template <class Body>
void for_each_block(const Problem& p, const KeyRanges& ranges, const QueryRows& rows,
                    const Body& body) {
  if (p.q.is_cuda()) {
    for_each_block_under_mask(p, rows, body);
  } else {
    for_each_block_by_user(p, ranges, body);
  }
}

// Rows [n, H, E] as one matrix a kv head, [Hk, n * H / Hk, E], and back.
Tensor to_kv_heads(const Tensor& rows, int64_t Hk) {
  const int64_t n = rows.size(0), group = rows.size(1) / Hk, E = rows.size(2);
  const Tensor heads = transpose(reshape(rows, {n, Hk, group, E}), 0, 1);
  return reshape(heads, {Hk, n * group, E});
}
Tensor to_rows(const Tensor& heads, int64_t n) {
  const int64_t Hk = heads.size(0), group = heads.size(1) / n, E = heads.size(2);
  return reshape(transpose(reshape(heads, {Hk, n, group, E}), 0, 1), {n, Hk * group, E});
}

// [B, S, ...] as [B * S, ...].
Tensor flatten_rows(const Tensor& t) {
  return reshape(t, {t.size(0) * t.size(1), t.size(2), t.size(3)});
}

void write_rows(const Tensor& to, const Block& block, const Tensor& values) {
  aten("aten::index_copy_", "", to, int64_t{0}, block.rows, cast(values, to.scalar_type()));
}

Tensor masked(const Tensor& values, const OptTensor& mask, double otherwise) {
  return mask ? where(*mask, values, scalar(otherwise, values.scalar_type(), values)) : values;
}

// weights [Hk, m, n] @ values [Hk, n, E] where `mask` [m, n] says which weights count; the others
// are 0. That alone doesn't keep the values out that they meet, since 0 * NaN is NaN: values that
// aren't finite are left out of the product, and a second one counts them where they do count, to
// make those results NaN (also the few where an infinity would have remained one).
Tensor product(const Tensor& weights, const Tensor& values, const OptTensor& mask) {
  const ScalarType dtype = values.scalar_type();
  const Tensor left = as_operand(weights, dtype);
  if (!mask) return bmm_accumulate(left, values);
  const Tensor stray = logical_not(aten("aten::isfinite", "", values));
  const Tensor sums = bmm_accumulate(left, where(stray, scalar(0, dtype, values), values));
  const Tensor counts =
      bmm_accumulate(expand(cast(*mask, dtype), sizes_of(weights)), cast(stray, dtype));
  const Tensor none = lt(counts, scalar(0.5, counts.scalar_type(), counts));
  return where(none, sums, scalar(kNan, sums.scalar_type(), sums));
}

// scale * q k^T, [Hk, n * H / Hk, T] in the accumulation type; -inf where a row doesn't attend.
Tensor scores_of(const Problem& p, const Tensor& q_heads, const Block& block) {
  const Tensor scores = mul(bmm_accumulate(q_heads, transpose(block.k, 1, 2)), p.scale);
  return masked(scores, block.mask, -kInfinity);
}

Tensor weights_of(const Tensor& scores, const Block& block) {
  const Tensor weights = aten("aten::_softmax", "", scores, int64_t{2}, false);
  // A row with nothing to attend to has the softmax of infinities alone, NaN.
  return masked(weights, block.mask, 0);
}

// Adds a block's share [Hk, T, E] to the gradient [n_keys, Hk, E].
void add_to_keys(const Tensor& grad, const Block& block, const Tensor& share) {
  const Tensor own = narrow(grad, 0, block.first_key, share.size(1));
  copy_(own, add(own, transpose(share, 0, 1)));
}

}  // namespace

KeyRanges key_ranges(const CandidateAttention& p) {
  const int64_t users = p.map.n_users;
  if (users == 0) {
    const Tensor none = zeros({1}, kPosition, p.q);
    return {none, none, full({1}, 1, ScalarType::Bool, p.q)};
  }
  Tensor first, room;  // room: how many keys there are from the first on
  if (p.flat()) {
    first = cast(narrow(*p.kv_start, 0, 0, users), kPosition);
    room = sub(scalar(static_cast<double>(p.n_keys()), kPosition, p.q), first);
  } else {
    const auto L = static_cast<double>(p.k.size(1));
    first = mul(cast(arange(users, p.q), kPosition), L);
    room = full({users}, L, kPosition, p.q);
  }
  Tensor length = room;
  if (p.kv_len) {
    length = cast(*p.kv_len, kPosition);
  } else if (p.flat()) {
    length = sub(cast(narrow(*p.kv_start, 0, 1, users), kPosition), first);
  }
  const Tensor zero = scalar(0, kPosition, p.q);
  const Tensor valid =
      logical_and(logical_and(ge(first, zero), ge(length, zero)), ge(room, length));
  return {torch::stable::contiguous(first), torch::stable::contiguous(length), valid};
}

Tensor candidate_attention_reference(const Problem& p, const Tensor& out, bool want_lse) {
  const int64_t n_rows = p.B() * p.S();
  const KeyRanges ranges = key_ranges(p);
  const QueryRows rows = query_rows(p, ranges);
  // An out that the caller gave may be a view that has no flat rows.
  const bool direct = out.is_contiguous();
  const Tensor target = direct ? out : empty(sizes_of(out), out.scalar_type(), out);
  const Tensor out_rows = flatten_rows(target), q_rows = flatten_rows(p.q);
  copy_(out_rows, reshape(rows.fill, {n_rows, 1, 1}));
  Tensor lse_rows = nothing(p.sums(), p.q);
  if (want_lse) {
    lse_rows = empty({n_rows, p.H(), 1}, p.sums(), p.q);
    copy_(lse_rows, aten("aten::log", "", reshape(rows.fill, {n_rows, 1, 1})));
  }
  for_each_block(p, ranges, rows, [&](const Block& block) {
    const int64_t n = block.rows.size(0);
    const Tensor q = to_kv_heads(index_select(q_rows, 0, block.rows), p.Hk());
    const Tensor scores = scores_of(p, q, block), weights = weights_of(scores, block);
    const Tensor values = to_rows(product(weights, block.v, block.mask), n);
    const Tensor fill = reshape(index_select(rows.fill, 0, block.rows), {n, 1, 1});
    write_rows(out_rows, block, add(values, fill));
    if (want_lse) {
      const Tensor lse = to_rows(aten("aten::logsumexp", "", scores, Sizes{2}, true), n);
      write_rows(lse_rows, block, add(lse, fill));
    }
  });
  if (!direct) copy_(out, target);
  if (!want_lse) return lse_rows;
  return torch::stable::contiguous(transpose(reshape(lse_rows, {p.B(), p.S(), p.H()}), 1, 2));
}

CandidateAttentionGrads candidate_attention_grads(const Problem& p, const Tensor& grad_out,
                                                  bool want_q, bool want_k, bool want_v) {
  const ScalarType dtype = p.q.scalar_type(), sums = p.sums();
  const KeyRanges ranges = key_ranges(p);
  const QueryRows rows = query_rows(p, ranges);
  const Tensor q_rows = flatten_rows(p.q), grad_out_rows = flatten_rows(grad_out);
  const auto all_keys = [&](const Tensor& like) {
    return zeros({p.n_keys(), p.Hk(), like.size(like.dim() - 1)}, sums, like);
  };
  const Tensor grad_q = want_q ? zeros(sizes_of(p.q), dtype, p.q) : nothing(dtype, p.q);
  const Tensor grad_q_rows = want_q ? flatten_rows(grad_q) : grad_q;
  Tensor grad_k = want_k ? all_keys(p.k) : nothing(dtype, p.k);
  Tensor grad_v = want_v ? all_keys(p.v) : nothing(dtype, p.v);
  for_each_block(p, ranges, rows, [&](const Block& block) {
    const int64_t n = block.rows.size(0);
    const Tensor q = to_kv_heads(index_select(q_rows, 0, block.rows), p.Hk());
    const Tensor grad = to_kv_heads(index_select(grad_out_rows, 0, block.rows), p.Hk());
    const OptTensor mask_of_keys =
        block.mask ? OptTensor(transpose(*block.mask, 0, 1)) : std::nullopt;
    const Tensor weights = weights_of(scores_of(p, q, block), block);
    if (want_v) add_to_keys(grad_v, block, product(transpose(weights, 1, 2), grad, mask_of_keys));
    if (!want_q && !want_k) return;
    // Masked before, for the row's sum, and after, since a row whose own gradient is NaN has it
    // everywhere.
    Tensor grad_scores = masked(bmm_accumulate(grad, transpose(block.v, 1, 2)), block.mask, 0);
    grad_scores = aten("aten::_softmax_backward_data", "", grad_scores, weights, int64_t{2}, sums);
    grad_scores = masked(mul(grad_scores, p.scale), block.mask, 0);
    if (want_q) {
      write_rows(grad_q_rows, block, to_rows(product(grad_scores, block.k, block.mask), n));
    }
    if (want_k) add_to_keys(grad_k, block, product(transpose(grad_scores, 1, 2), q, mask_of_keys));
  });
  if (want_k) grad_k = reshape(cast(grad_k, dtype), sizes_of(p.k));
  if (want_v) grad_v = reshape(cast(grad_v, dtype), sizes_of(p.v));
  return {grad_q, grad_k, grad_v};
}

}  // namespace ikbo
