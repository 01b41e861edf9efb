// The norms on kernels, where those take the call.
#pragma once

#include "ops/norm_reference.h"
#include "ops/record.h"

namespace ikbo {

// The scale of a y in e4m3: one for all, or one a row, found by the op. Neither: y isn't quantised.
struct NormScales {
  const OptTensor& given;
  const OptTensor& of_rows;  // contiguous
};

// Both record which path the call takes. False: it is left to the reference.
bool norm_forward_kernel(OpPaths& paths, const NormProblem& p, const NormInputs& in,
                         const Tensor& y, const NormOutputs& out,
                         const NormScales& scales = {std::nullopt, std::nullopt});
bool norm_backward_kernel(OpPaths& paths, const NormProblem& p, const NormBackwardInputs& in,
                          const NormGrads& grads);

}  // namespace ikbo
