// The candidate -> user map as ops see it, and the two things references do with it: give each
// candidate its user's row, and sum candidates' rows per user.
#pragma once

#include "ops/tensor.h"

namespace ikbo {

inline constexpr int32_t kPaddingRow = -1;

// The arguments cand_to_user, user_offsets?, order? of an op, checked.
struct CandidateMap {
  Tensor cand_to_user;  // int32 [B]; -1 padding, other values outside [0, n_users) out of range
  int64_t n_users;
  OptTensor user_offsets;  // int32 [U+1]
  OptTensor order;         // int32 [B]

  int64_t n_candidates() const { return cand_to_user.size(0); }
};

// Checks shapes, dtypes and devices against `like` (a tensor of the candidate side); casts int64
// maps to int32 without wrapping large values into range.
CandidateMap check_candidate_map(const char* op, const Tensor& cand_to_user, int64_t n_candidates,
                                 int64_t n_users, const OptTensor& user_offsets,
                                 const OptTensor& order, const Tensor& like);

// What each row of the batch needs to find its user, without a host sync on CUDA.
struct UserRows {
  Tensor index;        // int32 [B], always within [0, max(n_users, 1))
  OptTensor has_user;  // bool [B]; absent where every row is known to have a user (CPU only)
  OptTensor fill;      // fp32 [B]: what a row without a user holds: 0 (padding) or NaN
};
UserRows user_rows(const CandidateMap& map);

// values[b] where row b has a user, else 0 / NaN by `fill`, or 0 where `zero_fill`. `first` and the
// length of values' first dimension select the rows.
Tensor fill_rows_without_user(const Tensor& values, const UserRows& rows, int64_t first,
                              bool zero_fill);

// out[u] = sum over the candidates b of user u of values[b], in values' type (an accumulation type)
// and in the order of the batch: deterministic. values [B, ...] -> [U, ...].
Tensor sum_per_user(const Tensor& values, const CandidateMap& map);

// (order, user_offsets) of the map, from the op or from what the caller already gave.
std::tuple<Tensor, Tensor> grouping_of(const CandidateMap& map);

}  // namespace ikbo
