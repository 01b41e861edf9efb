// The norms on kernels where those take the call, and else by reference.
#pragma once

#include "ops/norm_reference.h"
#include "ops/record.h"

namespace ikbo {

// y is contiguous.
void norm_forward(OpPaths& paths, const NormProblem& p, const NormInputs& in, const Tensor& y,
                  const NormOutputs& out);

void norm_backward(OpPaths& paths, const NormProblem& p, const NormBackwardInputs& in,
                   const NormGrads& grads);

}  // namespace ikbo
