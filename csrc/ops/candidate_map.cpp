#include "ops/candidate_map.h"

#include "ops/checks.h"
#include "ops/ops.h"

namespace ikbo {
namespace {

void check_map_tensor(const char* op, const char* name, const Tensor& t, int64_t length,
                      const char* length_text, const Tensor& like) {
  IKBO_CHECK(t.dim() == 1 && t.size(0) == length, op, "expected ", name, " of shape [", length_text,
             "] = [", length, "], got ", shape_text(t), ".");
  check_same_device(op, name, t, "the candidate side", like);
}

// Values that int32 can't hold become another out-of-range value, not a wrapped one.
Tensor to_int32(const Tensor& map, int64_t n_users) {
  const Tensor users = scalar(static_cast<double>(n_users), ScalarType::Long, map);
  const Tensor padding = scalar(kPaddingRow, ScalarType::Long, map);
  const Tensor in_int32 = aten("aten::logical_and", "", aten("aten::ge", "Tensor", map, padding),
                               aten("aten::lt", "Tensor", map, users));
  return cast(where(in_int32, map, scalar(-2, ScalarType::Long, map)), ScalarType::Int);
}

}  // namespace

CandidateMap check_candidate_map(const char* op, const Tensor& cand_to_user, int64_t n_candidates,
                                 int64_t n_users, const OptTensor& user_offsets,
                                 const OptTensor& order, const Tensor& like) {
  const ScalarType dtype = cand_to_user.scalar_type();
  IKBO_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, op,
             "expected cand_to_user in int32 or int64, got ", dtype_text(dtype),
             ". Build it with ikbo.candidate_map().");
  check_map_tensor(op, "cand_to_user", cand_to_user, n_candidates, "B", like);
  IKBO_CHECK(n_users < std::numeric_limits<int32_t>::max(), op,
             "expected fewer than 2^31 - 1 users, got ", n_users, ".");
  if (user_offsets) {
    IKBO_CHECK(user_offsets->scalar_type() == ScalarType::Int, op,
               "expected user_offsets in int32, got ", dtype_text(user_offsets->scalar_type()),
               ".");
    check_map_tensor(op, "user_offsets", *user_offsets, n_users + 1, "U + 1", like);
  }
  if (order) {
    IKBO_CHECK(user_offsets.has_value(), op,
               "expected user_offsets beside order, got order alone. Pass both from "
               "ikbo.group_candidates() or ikbo.candidate_map().");
    IKBO_CHECK(order->scalar_type() == ScalarType::Int, op, "expected order in int32, got ",
               dtype_text(order->scalar_type()), ".");
    check_map_tensor(op, "order", *order, n_candidates, "B", like);
  }
  const Tensor map = dtype == ScalarType::Long ? to_int32(cand_to_user, n_users) : cand_to_user;
  return {map.is_contiguous() ? map : torch::stable::contiguous(map), n_users, user_offsets, order};
}

UserRows user_rows(const CandidateMap& map) {
  const Tensor& users = map.cand_to_user;
  if (users.is_cpu()) {
    const int32_t* user = users.const_data_ptr<int32_t>();
    const int64_t rows = map.n_candidates();
    const auto valid = [&](int32_t u) { return u >= 0 && u < map.n_users; };
    if (std::all_of(user, user + rows, valid)) return {users, std::nullopt, std::nullopt};
    Tensor index = empty({rows}, ScalarType::Int, users);
    Tensor has_user = empty({rows}, ScalarType::Bool, users);
    Tensor fill = empty({rows}, ScalarType::Float, users);
    for (int64_t b = 0; b < rows; ++b) {
      const bool ok = valid(user[b]);
      index.mutable_data_ptr<int32_t>()[b] = ok ? user[b] : 0;
      has_user.mutable_data_ptr<bool>()[b] = ok;
      fill.mutable_data_ptr<float>()[b] =
          user[b] == kPaddingRow ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    }
    return {index, has_user, fill};
  }
  const Tensor zero = scalar(0, ScalarType::Int, users);
  const Tensor limit = scalar(static_cast<double>(map.n_users), ScalarType::Int, users);
  const Tensor has_user = aten("aten::logical_and", "", aten("aten::ge", "Tensor", users, zero),
                               aten("aten::lt", "Tensor", users, limit));
  const Tensor padding =
      aten("aten::eq", "Tensor", users, scalar(kPaddingRow, ScalarType::Int, users));
  const Tensor fill =
      where(padding, scalar(0, ScalarType::Float, users),
            scalar(std::numeric_limits<double>::quiet_NaN(), ScalarType::Float, users));
  return {where(has_user, users, zero), has_user, fill};
}

Tensor fill_rows_without_user(const Tensor& values, const UserRows& rows, int64_t first,
                              bool zero_fill) {
  if (!rows.has_user) return values;
  Sizes column(values.dim(), 1);
  column[0] = values.size(0);
  const auto select = [&](const Tensor& per_row) {
    return reshape(narrow(per_row, 0, first, column[0]), column);
  };
  const Tensor fill = zero_fill ? scalar(0, values.scalar_type(), values)
                                : cast(select(*rows.fill), values.scalar_type());
  return where(select(*rows.has_user), values, fill);
}

std::tuple<Tensor, Tensor> grouping_of(const CandidateMap& map) {
  if (map.order) return {*map.order, *map.user_offsets};
  if (!map.user_offsets) return group_candidates(map.cand_to_user, map.n_users);
  // Offsets alone: the batch is grouped already.
  return {arange(map.n_candidates(), map.cand_to_user), *map.user_offsets};
}

Tensor sum_per_user(const Tensor& values, const CandidateMap& map) {
  Sizes out_sizes = sizes_of(values);
  out_sizes[0] = map.n_users;
  int64_t row = 1;
  for (size_t i = 1; i < out_sizes.size(); ++i) row *= out_sizes[i];
  if (map.n_users == 0 || values.numel() == 0)
    return zeros(out_sizes, values.scalar_type(), values);
  const auto [order, offsets] = grouping_of(map);
  // A bag a user: ATen sums each bag's rows one after the other, reading no row outside it.
  constexpr bool kScaleByFrequency = false, kSparse = false, kIncludeLastOffset = true;
  constexpr int64_t kModeSum = 0;
  const Tensor sums = std::get<0>(aten<Tensors4>(
      "aten::embedding_bag", "", torch::stable::contiguous(reshape(values, {values.size(0), row})),
      order, offsets, kScaleByFrequency, kModeSum, kSparse, OptTensor(), kIncludeLastOffset));
  return reshape(sums, out_sizes);
}

}  // namespace ikbo
