// Host entry of the grouping kernels. No tensors: raw pointers, checked by the op layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "config/group_candidates.h"

namespace ikbo {

struct GroupCandidatesParams {
  const int32_t* cand_to_user;  // [rows]
  int32_t* order;               // [rows]
  int32_t* user_offsets;        // [n_users + 1]
  int32_t* scratch;             // config.scratch_words(rows)
  int64_t rows;                 // < 2^31
  int64_t n_users;              // < 2^31 - 1
};

void run_group_candidates(const GroupCandidatesParams& params, const GroupCandidatesConfig& config,
                          cudaStream_t stream);
void load_group_candidates();

}  // namespace ikbo
