// Which compiled backward a config takes, for one type of x.
#pragma once

#include "kernels/norm/backward_sm90.cuh"
#include "kernels/norm/compiled.h"

namespace ikbo::norm {

template <class T, bool kFull>
BackwardKernel backward_in_warp(int vectors) {
  if constexpr (kFull) {
    if (vectors == 1) return norm_backward_sm90<T, 1, true, true>;
    if (vectors == 3) return norm_backward_sm90<T, 3, true, true>;
    if (vectors == 5) return norm_backward_sm90<T, 5, true, true>;
  }
  if (vectors <= 2) return norm_backward_sm90<T, 2, true, kFull>;
  if (vectors <= 4) return norm_backward_sm90<T, 4, true, kFull>;
  return norm_backward_sm90<T, 9, true, kFull>;
}

template <class T, bool kFull>
BackwardKernel backward_over_warps(int vectors) {
  if constexpr (kFull) {
    if (vectors == 1) return norm_backward_sm90<T, 1, false, true>;
    if (vectors == 3) return norm_backward_sm90<T, 3, false, true>;
  }
  return vectors <= 2 ? norm_backward_sm90<T, 2, false, kFull>
                      : norm_backward_sm90<T, 4, false, kFull>;
}

#define IKBO_NORM_BACKWARD(T)                                                                     \
  template <>                                                                                     \
  BackwardKernel backward_kernel<T>(int vectors, bool in_warp, bool full) {                       \
    if (in_warp) {                                                                                \
      return full ? backward_in_warp<T, true>(vectors) : backward_in_warp<T, false>(vectors);     \
    }                                                                                             \
    return full ? backward_over_warps<T, true>(vectors) : backward_over_warps<T, false>(vectors); \
  }

}  // namespace ikbo::norm
