#pragma once

#include "ops/user_join_reference.h"

namespace ikbo {

// x_user @ w_user^T in the accumulation type, [U, N].
Tensor concat_linear_user_part(const Tensor& x_user, const Tensor& w_user);

// out[b] = act(w_cand @ x_cand[b] + user_part[u(b)] + bias); preact where it has a size.
void concat_linear_reference(const Tensor& x_cand, const Tensor& w_cand, const Tensor& user_part,
                             const OptTensor& bias, const CandidateMap& map, Activation activation,
                             const Tensor& out, const OptTensor& preact);

struct ConcatLinearGrads {
  Tensor preactivation;         // [B, N], accumulation type; rows without a user are 0
  Tensor x_cand, w_cand, bias;  // size 0 where not wanted
};
ConcatLinearGrads concat_linear_candidate_grads(const Tensor& grad_out, const Tensor& x_cand,
                                                const Tensor& w_cand, const Tensor& saved,
                                                const CandidateMap& map, Activation activation,
                                                bool want_x_cand, bool want_w_cand, bool want_bias);

}  // namespace ikbo
