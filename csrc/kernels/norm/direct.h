// The forward without rings, chosen at each call by the environment (for comparing alone):
//   IKBO_NORM_DIRECT=0 or unset   the other kernels
//   1                             one of the same layout, and so bits, as theirs, where there is
//   one LxVxR                         L threads a row, V vectors each, R rows a group of threads e
//   behind either               weight and bias are read with x :T behind that                T
//   threads a CTA, of rows within a warp (else 256)
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/norm/norm.h"

namespace ikbo::norm {

// False, and nothing is launched, where no such kernel is compiled or the problem isn't one for it.
bool run_direct(const NormForward& p, const NormConfig& config, cudaStream_t stream);
void load_direct();

}  // namespace ikbo::norm
