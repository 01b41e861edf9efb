// Which compiled forward a config takes, for one type of x.
#pragma once

#include "kernels/norm/compiled.h"
#include "kernels/norm/forward_loose_overlapped_sm90.cuh"
#include "kernels/norm/forward_sm90.cuh"
#include "kernels/norm/forward_whole_sm90.cuh"

namespace ikbo::norm {

// Rows over warps have up to 4 vectors a thread.
template <class T>
ForwardKernel forward_whole(int vectors, bool in_warp, bool layer, std::optional<PlainForm> form) {
  const auto pick_plain = [&](auto count, auto within, auto of_layer) -> ForwardKernel {
    if (form == PlainForm::kEarly) {
      return norm_forward_plain_sm90<T, count, within, of_layer, PlainForm::kEarly>;
    }
    if (form == PlainForm::kQuantizes) {
      return norm_forward_plain_sm90<T, count, within, of_layer, PlainForm::kQuantizes>;
    }
    if constexpr (!within) {
      if (form == PlainForm::kPersistent) {
        return norm_forward_plain_sm90<T, count, within, of_layer, PlainForm::kPersistent>;
      }
    }
    return norm_forward_plain_sm90<T, count, within, of_layer, PlainForm::kUsual>;
  };
  const auto pick = [&](auto count, auto within) -> ForwardKernel {
    if (!form) return norm_forward_whole_sm90<T, count, within>;
    return layer ? pick_plain(count, within, std::true_type{})
                 : pick_plain(count, within, std::false_type{});
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

#define IKBO_NORM_FORWARD(T)                                                           \
  template <>                                                                          \
  ForwardKernel forward_kernel<T>(int vectors, bool in_warp) {                         \
    if (in_warp && vectors > 4) return norm_forward_sm90<T, 9, true>;                  \
    if (vectors > 2)                                                                   \
      return in_warp ? norm_forward_sm90<T, 4, true> : norm_forward_sm90<T, 4, false>; \
    return in_warp ? norm_forward_sm90<T, 2, true> : norm_forward_sm90<T, 2, false>;   \
  }                                                                                    \
  template <>                                                                          \
  ForwardKernel forward_whole_kernel<T>(int vectors, bool in_warp, bool layer,         \
                                        std::optional<PlainForm> form) {               \
    return forward_whole<T>(vectors, in_warp, layer, form);                            \
  }                                                                                    \
  template <>                                                                          \
  ForwardKernel forward_loose_kernel<T>(int vectors, int lanes) {                      \
    return forward_loose<T>(vectors, lanes);                                           \
  }

}  // namespace ikbo::norm
