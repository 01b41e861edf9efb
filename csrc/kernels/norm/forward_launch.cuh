// Which compiled forward a config takes, for one type of x.
#pragma once

#include "kernels/norm/compiled.h"
#include "kernels/norm/forward_loose_sm90.cuh"
#include "kernels/norm/forward_overlapped_sm90.cuh"
#include "kernels/norm/forward_sm90.cuh"

namespace ikbo::norm {

template <class T, bool kFull>
ForwardKernel forward_in_warp(int vectors) {
  if constexpr (kFull) {
    if (vectors == 1) return norm_forward_sm90<T, 1, true, true>;
    if (vectors == 3) return norm_forward_sm90<T, 3, true, true>;
    if (vectors == 5) return norm_forward_sm90<T, 5, true, true>;
  }
  if (vectors <= 2) return norm_forward_sm90<T, 2, true, kFull>;
  if (vectors <= 4) return norm_forward_sm90<T, 4, true, kFull>;
  return norm_forward_sm90<T, 9, true, kFull>;
}

template <class T, bool kFull>
ForwardKernel forward_over_warps(int vectors) {
  return pick_over_warps<kFull>(vectors, [](auto count) -> ForwardKernel {
    return norm_forward_sm90<T, count, false, kFull>;
  });
}

// `sure`: slots that all threads of a row over warps have a column for.
template <class T, bool kPlain>
ForwardKernel forward_loose(int vectors, int lanes, int sure, bool cluster) {
  if (lanes <= 32) {
    return pick_loose(vectors, lanes, [](auto count, auto of_row) -> ForwardKernel {
      return norm_forward_loose_sm90<T, count, of_row, kPlain>;
    });
  }
  if constexpr (kPlain) {
    constexpr int kMost = 28 * 2 / sizeof(T);
    if (cluster) return norm_forward_loose_sm90<T, 4, 0, true, 0, true>;
    if (sure >= kMost) return norm_forward_loose_sm90<T, 4, 0, true, kMost>;
  }
  return norm_forward_loose_sm90<T, 4, 0, kPlain>;
}

#define IKBO_NORM_FORWARD(T)                                                                       \
  template <>                                                                                      \
  ForwardKernel forward_kernel<T>(int vectors, bool in_warp, bool full) {                          \
    if (in_warp) {                                                                                 \
      return full ? forward_in_warp<T, true>(vectors) : forward_in_warp<T, false>(vectors);        \
    }                                                                                              \
    return full ? forward_over_warps<T, true>(vectors) : forward_over_warps<T, false>(vectors);    \
  }                                                                                                \
  template <>                                                                                      \
  ForwardKernel forward_overlapped_kernel<T>(int vectors) {                                        \
    return vectors == 3 ? norm_forward_overlapped_sm90<T, 3> : norm_forward_overlapped_sm90<T, 4>; \
  }                                                                                                \
  template <>                                                                                      \
  ForwardKernel forward_loose_kernel<T>(int vectors, int lanes, int sure, bool cluster,            \
                                        bool plain) {                                              \
    return plain ? forward_loose<T, true>(vectors, lanes, sure, cluster)                           \
                 : forward_loose<T, false>(vectors, lanes, sure, cluster);                         \
  }

}  // namespace ikbo::norm
