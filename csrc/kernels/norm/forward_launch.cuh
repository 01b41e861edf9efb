// Which compiled forward a config takes, for one type of x.
#pragma once

#include "kernels/norm/compiled.h"
#include "kernels/norm/forward_sm90.cuh"

namespace ikbo::norm {

#define IKBO_NORM_FORWARD(T)                                                           \
  template <>                                                                          \
  ForwardKernel forward_kernel<T>(int kernel_vectors, bool aligned) {                  \
    if (kernel_vectors <= 2) {                                                         \
      return aligned ? norm_forward_sm90<T, 2, true> : norm_forward_sm90<T, 2, false>; \
    }                                                                                  \
    if (kernel_vectors == 4) {                                                         \
      return aligned ? norm_forward_sm90<T, 4, true> : norm_forward_sm90<T, 4, false>; \
    }                                                                                  \
    return aligned ? norm_forward_sm90<T, 9, true> : norm_forward_sm90<T, 9, false>;   \
  }

}  // namespace ikbo::norm
