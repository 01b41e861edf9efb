// Which compiled forward a config takes, for one type of x.
#pragma once

#include <array>

#include "kernels/norm/compiled.h"
#include "kernels/norm/forward_loose_sm90.cuh"
#include "kernels/norm/forward_pairs_sm90.cuh"
#include "kernels/norm/forward_quant_sm90.cuh"
#include "kernels/norm/forward_sm90.cuh"
#include "kernels/norm/forward_whole_sm90.cuh"
#include "kernels/norm/forward_wide_sm90.cuh"

namespace ikbo::norm {

// Rows over warps have up to 4 vectors a thread.
template <class T>
ForwardKernel forward_whole(int vectors, bool in_warp) {
  const auto pick_either = [&](auto count) -> ForwardKernel {
    return in_warp ? norm_forward_whole_sm90<T, count, true>
                   : norm_forward_whole_sm90<T, count, false>;
  };
  if (vectors == 1) return pick_either(kNumber<1>);
  if (vectors == 2) return pick_either(kNumber<2>);
  if (vectors == 3) return pick_either(kNumber<3>);
  if (vectors == 4) return pick_either(kNumber<4>);
  return vectors == 5 ? norm_forward_whole_sm90<T, 5, true> : norm_forward_whole_sm90<T, 9, true>;
}

template <class T, int kVectors, int kLanes>
PlainKernel forward_plain_of(bool layer, WholeForm form) {
  constexpr auto kPlain = WholeForm::kPlain, kEarly = WholeForm::kEarly;
  constexpr auto kHeads = WholeForm::kHeads, kHalves = WholeForm::kHalves;
  if (form == kHeads) return norm_forward_plain_sm90<T, kVectors, kLanes, false, kHeads>;
  if (form == WholeForm::kQuant) {
    return layer ? norm_forward_quant_sm90<T, kVectors, kLanes, true>
                 : norm_forward_quant_sm90<T, kVectors, kLanes, false>;
  }
  if constexpr (kVectors == 4 && kLanes == 0) {
    if (form == kHalves) return norm_forward_plain_sm90<T, kVectors, kLanes, false, kHalves>;
  }
  if constexpr (kLanes == 0) {
    if (form == kPlain) {
      return layer ? norm_forward_plain_sm90<T, kVectors, kLanes, true, kPlain>
                   : norm_forward_plain_sm90<T, kVectors, kLanes, false, kPlain>;
    }
  }
  return layer ? norm_forward_plain_sm90<T, kVectors, kLanes, true, kEarly>
               : norm_forward_plain_sm90<T, kVectors, kLanes, false, kEarly>;
}

// The layouts of whole rows: norm_mapping() takes the fewest lanes.
template <class T>
PlainKernel forward_plain(int vectors, int lanes, bool layer, WholeForm form) {
  PlainKernel found = nullptr;
  const auto try_one = [&](auto count, auto of_row) {
    if (vectors == count && lanes == of_row)
      found = forward_plain_of<T, count, of_row>(layer, form);
  };
  const auto try_lanes = [&](auto of_row, auto... counts) { (try_one(counts, of_row), ...); };
  try_lanes(kNumber<0>, kNumber<1>, kNumber<2>, kNumber<3>, kNumber<4>);
  try_lanes(kNumber<8>, kNumber<1>, kNumber<2>, kNumber<3>, kNumber<4>, kNumber<5>, kNumber<9>);
  try_lanes(kNumber<16>, kNumber<3>, kNumber<4>, kNumber<5>, kNumber<9>);
  try_lanes(kNumber<32>, kNumber<3>, kNumber<4>, kNumber<5>, kNumber<9>);
  return found;
}

template <class T>
PlainKernel forward_pairs(int warps) {
  static_assert(kMostPairWarps == 7);
  const std::array<PlainKernel, kMostPairWarps + 1> kernels = {
      nullptr,
      nullptr,
      norm_forward_pairs_sm90<T, 2>,
      norm_forward_pairs_sm90<T, 3>,
      norm_forward_pairs_sm90<T, 4>,
      norm_forward_pairs_sm90<T, 5>,
      norm_forward_pairs_sm90<T, 6>,
      norm_forward_pairs_sm90<T, 7>,
  };
  return kernels[warps];
}

template <class T>
ForwardKernel forward_at_any_address(int vectors, bool in_warp) {
  if (in_warp && vectors > 4) return norm_forward_sm90<T, 9, true, false>;
  if (in_warp) {
    return vectors > 2 ? norm_forward_sm90<T, 4, true, false>
                       : norm_forward_sm90<T, 2, true, false>;
  }
  return vectors > 2 ? norm_forward_sm90<T, 4, false, false>
                     : norm_forward_sm90<T, 2, false, false>;
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

template <class T, int kVectors>
ForwardKernel forward_wide(bool layer) {
  return layer ? norm_forward_wide_sm90<T, kVectors, true>
               : norm_forward_wide_sm90<T, kVectors, false>;
}

#define IKBO_NORM_FORWARD(T)                                                                \
  template <>                                                                               \
  ForwardKernel forward_kernel<T>(int vectors, bool in_warp, bool full) {                   \
    if (!full) return forward_at_any_address<T>(vectors, in_warp);                          \
    return vectors == 3 ? norm_forward_sm90<T, 3, false, true>                              \
                        : norm_forward_sm90<T, 4, false, true>;                             \
  }                                                                                         \
  template <>                                                                               \
  ForwardKernel forward_wide_kernel<T>(int vectors, bool layer) {                           \
    return vectors == 3 ? forward_wide<T, 3>(layer) : forward_wide<T, 4>(layer);            \
  }                                                                                         \
  template <>                                                                               \
  ForwardKernel forward_whole_kernel<T>(int vectors, bool in_warp) {                        \
    return forward_whole<T>(vectors, in_warp);                                              \
  }                                                                                         \
  template <>                                                                               \
  PlainKernel forward_plain_kernel<T>(int vectors, int lanes, bool layer, WholeForm form) { \
    return forward_plain<T>(vectors, lanes, layer, form);                                   \
  }                                                                                         \
  template <>                                                                               \
  PlainKernel forward_pairs_kernel<T>(int warps) {                                          \
    return forward_pairs<T>(warps);                                                         \
  }                                                                                         \
  template <>                                                                               \
  ForwardKernel forward_loose_kernel<T>(int vectors, int lanes, int sure, bool cluster,     \
                                        bool plain) {                                       \
    return plain ? forward_loose<T, true>(vectors, lanes, sure, cluster)                    \
                 : forward_loose<T, false>(vectors, lanes, sure, cluster);                  \
  }

}  // namespace ikbo::norm
