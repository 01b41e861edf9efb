// The forward without rings, chosen at each call by the environment's IKBO_NORM_DIRECT (for
// comparing alone):
//   0 or unset  the other kernels
//   1           the layout, and so the bits, of the other kernels, where there is one
//   LxVxR       L threads a row, V vectors each, R rows a group of threads
// and behind either
//   e           weight and bias are read with x
//   p           plain stores, not streaming ones
//   :T          T threads a CTA, of rows within a warp (else 256)
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/norm/norm.h"

namespace ikbo::norm {

// False, and nothing is launched, where no such kernel is compiled or the problem isn't one for it.
bool run_direct(const NormForward& p, const NormConfig& config, cudaStream_t stream);
void load_direct();

}  // namespace ikbo::norm
