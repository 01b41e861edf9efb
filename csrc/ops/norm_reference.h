// The reference of every norm: y = norm(x [+ residual]) * (weight + weight_offset) + bias.
//
// A row's bits depend on that row alone, never on how many rows there are: see row_sum in
// norm_reference.cpp.
#pragma once

#include <functional>

#include "ops/norm_problem.h"

namespace ikbo {

// What a forward writes; what is absent was not asked for. All contiguous.
struct NormOutputs {
  OptTensor residual_out = {}, mean = {}, rstd = {};
};

// Takes rows [first, first + count) of y: [count, groups, columns], not rounded yet.
using StoreRows = std::function<void(int64_t first, int64_t count, const Tensor& y)>;

void norm_rows_reference(const NormProblem& p, const NormInputs& in, const NormOutputs& out,
                         const StoreRows& store);

// Rounds y to its dtype; y is contiguous.
void norm_reference(const NormProblem& p, const NormInputs& in, const Tensor& y,
                    const NormOutputs& out);

struct NormBackwardInputs {
  const Tensor& grad_y;
  const OptTensor& grad_residual_out;
  const Tensor& x;  // what was normalised
  const OptTensor& weight;
  const Tensor* mean;  // LayerNorm only
  const Tensor& rstd;
};

// The gradients that are wanted: allocated by the caller, contiguous. x and residual are the same
// sum in two dtypes.
struct NormGrads {
  OptTensor x, residual, weight, bias;
};

void norm_backward_reference(const NormProblem& p, const NormBackwardInputs& in,
                             const NormGrads& grads);

}  // namespace ikbo
