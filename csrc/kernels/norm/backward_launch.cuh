// Which compiled backward a config takes, for one type of x.
#pragma once

#include "kernels/norm/backward_sm90.cuh"
#include "kernels/norm/compiled.h"

namespace ikbo::norm {

template <class T, int kVectors>
BackwardKernel backward_kernel_with(bool aligned, bool bias) {
  if (!aligned) return norm_backward_sm90<T, kVectors, false, true>;
  return bias ? norm_backward_sm90<T, kVectors, true, true>
              : norm_backward_sm90<T, kVectors, true, false>;
}

#define IKBO_NORM_BACKWARD(T)                                                      \
  template <>                                                                      \
  BackwardKernel backward_kernel<T>(int kernel_vectors, bool aligned, bool bias) { \
    if (kernel_vectors == 1) return backward_kernel_with<T, 1>(aligned, bias);     \
    if (kernel_vectors == 4) return backward_kernel_with<T, 4>(aligned, bias);     \
    return backward_kernel_with<T, 9>(aligned, bias);                              \
  }

}  // namespace ikbo::norm
