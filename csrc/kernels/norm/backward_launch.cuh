// Which compiled backward a config takes, for one type of x.
#pragma once

#include "kernels/norm/backward_sm90.cuh"
#include "kernels/norm/compiled.h"

namespace ikbo::norm {

#define IKBO_NORM_BACKWARD(T)                                                            \
  template <>                                                                            \
  BackwardKernel backward_kernel<T>(int kernel_vectors, bool aligned) {                  \
    if (kernel_vectors == 1 && aligned) return norm_backward_sm90<T, 1, true>;           \
    if (kernel_vectors <= 2) {                                                           \
      return aligned ? norm_backward_sm90<T, 2, true> : norm_backward_sm90<T, 2, false>; \
    }                                                                                    \
    if (kernel_vectors == 4) {                                                           \
      return aligned ? norm_backward_sm90<T, 4, true> : norm_backward_sm90<T, 4, false>; \
    }                                                                                    \
    return aligned ? norm_backward_sm90<T, 9, true> : norm_backward_sm90<T, 9, false>;   \
  }

}  // namespace ikbo::norm
