// The gradients of candidate_attention by PyTorch's variable-length flash attention: each user's
// query rows are one sequence, its keys the other side of it.
#pragma once

#include "ops/candidate_attention_reference.h"

namespace ikbo {

// Why it doesn't take the case, or nullptr.
const char* flash_decline_reason(const CandidateAttention& problem);

// For a problem without a decline reason. All three are computed; those not wanted have size 0.
CandidateAttentionGrads candidate_attention_flash_grads(const CandidateAttention& problem,
                                                        const Tensor& grad_out, const Tensor& out,
                                                        const Tensor& lse, bool want_q, bool want_k,
                                                        bool want_v);

// For explain: what the call runs.
struct FlashBackward {
  int64_t sequences;
};
std::string to_json(const FlashBackward& config);
FlashBackward flash_config(const CandidateAttention& problem);

}  // namespace ikbo
