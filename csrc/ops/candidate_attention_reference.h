#pragma once

#include "ops/candidate_map.h"

namespace ikbo {

// The checked arguments of a candidate_attention op.
struct CandidateAttention {
  Tensor q;     // [B, S, H, D]
  Tensor k, v;  // dense [U, L, Hk, D], [U, L, Hk, Dv]; flat [T, Hk, D], [T, Hk, Dv]
  // int32 or int64. Flat k and v have both [U], or a kv_start [U + 1] alone: each user's keys end
  // where the next one's start.
  OptTensor kv_start, kv_len;
  CandidateMap map;
  double scale;

  bool flat() const { return k.dim() == 3; }
  int64_t B() const { return q.size(0); }
  int64_t S() const { return q.size(1); }
  int64_t H() const { return q.size(2); }
  int64_t D() const { return q.size(3); }
  int64_t Hk() const { return k.size(k.dim() - 2); }
  int64_t Dv() const { return v.size(v.dim() - 1); }
  // All keys, one user's after the other's: T, or U * L.
  int64_t n_keys() const { return flat() ? k.size(0) : k.size(0) * k.size(1); }
  ScalarType sums() const { return accumulate_type(q.scalar_type()); }
};

// Where each user's keys are among all keys, in fp64, which is exact below 2^53 and where the
// stable ABI can add; [max(U, 1)], so that rows without a user have something to read. An invalid
// range is whatever it was given as.
struct KeyRanges {
  Tensor first, length, valid;
};
KeyRanges key_ranges(const CandidateAttention& problem);

// Writes out [B, S, H, Dv]. Returns lse [B, H, S] in the accumulation type where asked for, else a
// tensor of size 0.
Tensor candidate_attention_reference(const CandidateAttention& problem, const Tensor& out,
                                     bool want_lse);

struct CandidateAttentionGrads {
  Tensor q, k, v;  // size 0 where not wanted
};
// The weights are computed again: what the reference would read from out and lse is a rounding
// away.
CandidateAttentionGrads candidate_attention_grads(const CandidateAttention& problem,
                                                  const Tensor& grad_out, bool want_q, bool want_k,
                                                  bool want_v);

}  // namespace ikbo
