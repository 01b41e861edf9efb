#pragma once

#include "ops/tensor.h"

namespace ikbo {

// The counting sort on the CPU, into order [B] and user_offsets [U+1]. On a GPU without the kernel:
// the same by ATen's stable sort.
std::tuple<Tensor, Tensor> group_candidates_reference(const Tensor& cand_to_user, int64_t n_users);

}  // namespace ikbo
