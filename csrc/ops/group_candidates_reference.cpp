#include "ops/group_candidates_reference.h"

namespace ikbo {
namespace {

std::tuple<Tensor, Tensor> on_cpu(const Tensor& cand_to_user, int64_t n_users) {
  const int64_t rows = cand_to_user.size(0);
  Tensor order = empty({rows}, ScalarType::Int, cand_to_user);
  Tensor offsets = empty({n_users + 1}, ScalarType::Int, cand_to_user);
  const int32_t* user = cand_to_user.const_data_ptr<int32_t>();
  // Rows without a user take the key n_users, so they come last.
  const auto key = [&](int64_t b) {
    return user[b] >= 0 && user[b] < n_users ? int64_t{user[b]} : n_users;
  };
  std::vector<int32_t> next(n_users + 2, 0);  // next[k + 1] counts key k, then next[k] is its place
  for (int64_t b = 0; b < rows; ++b) ++next[key(b) + 1];
  for (int64_t k = 0; k <= n_users; ++k) next[k + 1] += next[k];
  std::copy(next.begin(), next.begin() + n_users + 1, offsets.mutable_data_ptr<int32_t>());
  int32_t* out = order.mutable_data_ptr<int32_t>();
  for (int64_t b = 0; b < rows; ++b) out[next[key(b)]++] = static_cast<int32_t>(b);
  return {order, offsets};
}

}  // namespace

std::tuple<Tensor, Tensor> group_candidates_reference(const Tensor& cand_to_user, int64_t n_users) {
  if (cand_to_user.is_cpu()) return on_cpu(cand_to_user, n_users);
  const Tensor users = scalar(static_cast<double>(n_users), ScalarType::Int, cand_to_user);
  const Tensor zero = scalar(0, ScalarType::Int, cand_to_user);
  const Tensor has_user =
      aten("aten::logical_and", "", aten("aten::ge", "Tensor", cand_to_user, zero),
           aten("aten::lt", "Tensor", cand_to_user, users));
  const Tensor keys = where(has_user, cand_to_user, users);
  const Tensor order = aten("aten::argsort", "stable", keys, true, int64_t{0}, false);
  const Tensor sorted = index_select(keys, 0, order);
  const Tensor offsets = aten("aten::searchsorted", "Tensor", sorted,
                              arange(n_users + 1, cand_to_user), /*out_int32=*/true,
                              /*right=*/false, std::optional<std::string>(), OptTensor());
  return {cast(order, ScalarType::Int), offsets};
}

}  // namespace ikbo
