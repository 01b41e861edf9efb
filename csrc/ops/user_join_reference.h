// The reference of every linear op with a shared user side: out[b] = act(product(b) + part[u(b)]).
// linear_compression and concat_linear differ only in what a row and its product are.
#pragma once

#include "ops/activation.h"
#include "ops/candidate_map.h"

namespace ikbo {

// Writes out[b] (and preact[b], where asked for) slice by slice. user_part [U, row...] and bias,
// which broadcasts over a row, are joined in the accumulation type; product(first, count) returns
// the candidates' own product of those rows in that type.
template <class Product>
void join_user_part_reference(const Tensor& user_part, const OptTensor& bias,
                              const CandidateMap& map, Activation activation,
                              const Product& product, const Tensor& out, const OptTensor& preact) {
  const int64_t batch = map.n_candidates();
  if (out.numel() == 0) return;
  const ScalarType sums = accumulate_type(out.scalar_type());
  const UserRows rows = user_rows(map);
  Tensor part = cast(user_part, sums);
  if (map.n_users == 0) {  // rows have an index to read from even where nobody has a user
    Sizes one_row = sizes_of(part);
    one_row[0] = 1;
    part = zeros(one_row, sums, part);
  }
  if (bias) part = add(part, cast(*bias, sums));
  int64_t row_bytes = out.numel() / batch * (sums == ScalarType::Double ? 8 : 4);
  // On a CPU the product, the part and their sum, 2 MiB each, stay in the cache.
  if (!out.is_cuda()) row_bytes *= workspace_bytes(out) >> 21;
  for_each_slice(out, batch, row_bytes, [&](int64_t first, int64_t count) {
    const Tensor pre =
        add(product(first, count), index_select(part, 0, narrow(rows.index, 0, first, count)));
    if (preact) {
      copy_(narrow(*preact, 0, first, count), fill_rows_without_user(pre, rows, first, true));
    }
    copy_(narrow(out, 0, first, count),
          fill_rows_without_user(apply_activation(activation, pre), rows, first, false));
  });
}

// The gradient of the pre-activation [B, row...] in the accumulation type; rows without a user are
// 0. `saved` is the pre-activation or the output (activation.h); unused for Activation::kNone.
Tensor preactivation_grad(const Tensor& grad_out, const Tensor& saved, const UserRows& rows,
                          Activation activation);

// sum over g of a[g] @ b[g] for a [G,m,k], b [G,k,n], slice by slice. Rows without a user are left
// out of b, so that what a padding row holds (NaN, say) has no share.
Tensor sum_of_products(const Tensor& a, const Tensor& b, const UserRows* rows);

}  // namespace ikbo
