// Which compiled forward a config takes, for one type of x.
#pragma once

#include "kernels/norm/compiled.h"
#include "kernels/norm/forward_loose_overlapped_sm90.cuh"
#include "kernels/norm/forward_overlapped_sm90.cuh"
#include "kernels/norm/forward_sm90.cuh"
#include "kernels/norm/forward_whole_sm90.cuh"

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

// Rows over warps have up to 4 vectors a thread.
template <class T>
ForwardKernel forward_whole(int vectors, bool in_warp, bool plain, bool layer, bool early) {
  const auto pick = [&](auto count, auto within) -> ForwardKernel {
    if (!plain) return norm_forward_whole_sm90<T, count, within>;
    if (layer) {
      return early ? norm_forward_plain_sm90<T, count, within, true, true>
                   : norm_forward_plain_sm90<T, count, within, true, false>;
    }
    return early ? norm_forward_plain_sm90<T, count, within, false, true>
                 : norm_forward_plain_sm90<T, count, within, false, false>;
  };
  const auto pick_either = [&](auto count) {
    return in_warp ? pick(count, std::true_type{}) : pick(count, std::false_type{});
  };
  if (vectors == 1) return pick_either(kNumber<1>);
  if (vectors == 2) return pick_either(kNumber<2>);
  if (vectors == 3) return pick_either(kNumber<3>);
  if (vectors == 4) return pick_either(kNumber<4>);
  return vectors == 5 ? pick(kNumber<5>, std::true_type{}) : pick(kNumber<9>, std::true_type{});
}

template <class T>
ForwardKernel forward_loose(int vectors, int lanes) {
  if (lanes > 32) return norm_forward_loose_overlapped_sm90<T>;
  return pick_loose(vectors, lanes, [](auto count, auto of_row) -> ForwardKernel {
    return norm_forward_loose_sm90<T, count, of_row>;
  });
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
  ForwardKernel forward_whole_kernel<T>(int vectors, bool in_warp, bool plain, bool layer,         \
                                        bool early) {                                              \
    return forward_whole<T>(vectors, in_warp, plain, layer, early);                                \
  }                                                                                                \
  template <>                                                                                      \
  ForwardKernel forward_overlapped_kernel<T>(int vectors) {                                        \
    return vectors == 3 ? norm_forward_overlapped_sm90<T, 3> : norm_forward_overlapped_sm90<T, 4>; \
  }                                                                                                \
  template <>                                                                                      \
  ForwardKernel forward_loose_kernel<T>(int vectors, int lanes) {                                  \
    return forward_loose<T>(vectors, lanes);                                                       \
  }

}  // namespace ikbo::norm
