#pragma once

#include "ops/user_join_reference.h"

namespace ikbo {

// w_user @ e_user[u] in the accumulation type, [U, M, N].
Tensor linear_compression_user_part(const Tensor& e_user, const Tensor& w_user);

// out[b] = act(w_cand @ e_cand[b] + user_part[u(b)] + bias[:, None]); preact where it has a size.
void linear_compression_reference(const Tensor& e_cand, const Tensor& w_cand,
                                  const Tensor& user_part, const OptTensor& bias,
                                  const CandidateMap& map, Activation activation, const Tensor& out,
                                  const OptTensor& preact);

struct LinearCompressionGrads {
  Tensor preactivation;         // [B, M, N], accumulation type; rows without a user are 0
  Tensor e_cand, w_cand, bias;  // size 0 where not wanted
};
LinearCompressionGrads linear_compression_candidate_grads(const Tensor& grad_out,
                                                          const Tensor& e_cand,
                                                          const Tensor& w_cand, const Tensor& saved,
                                                          const CandidateMap& map,
                                                          Activation activation, bool want_e_cand,
                                                          bool want_w_cand, bool want_bias);

}  // namespace ikbo
