// Which compiled forward a config takes, for one type of x.
#pragma once

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

template <class T, int kVectors, int kLanes, WholeForm kForm>
PlainKernel forward_plain_of(bool layer) {
  return layer ? norm_forward_plain_sm90<T, kVectors, kLanes, true, kForm>
               : norm_forward_plain_sm90<T, kVectors, kLanes, false, kForm>;
}

template <class T, int kVectors, int kLanes>
PlainKernel forward_quant_of(bool layer) {
  return layer ? norm_forward_quant_sm90<T, kVectors, kLanes, true>
               : norm_forward_quant_sm90<T, kVectors, kLanes, false>;
}

template <class T>
PlainKernel forward_pairs(int warps) {
  static_assert(kMostPairWarps == 5);
  if (warps == 2) return norm_forward_pairs_sm90<T, 2>;
  if (warps == 3) return norm_forward_pairs_sm90<T, 3>;
  if (warps == 4) return norm_forward_pairs_sm90<T, 4>;
  return warps == 5 ? norm_forward_pairs_sm90<T, 5> : nullptr;
}

template <class T, int kVectors, int kLanes>
PlainKernel forward_plain_within(bool layer, WholeForm form) {
  constexpr auto kHeads = WholeForm::kHeads;
  if (form == kHeads) return norm_forward_plain_sm90<T, kVectors, kLanes, false, kHeads>;
  if (form == WholeForm::kQuant) return forward_quant_of<T, kVectors, kLanes>(layer);
  return forward_plain_of<T, kVectors, kLanes, WholeForm::kEarly>(layer);
}

template <class T, int kVectors>
PlainKernel forward_plain_over(int lanes, bool layer, WholeForm form) {
  constexpr auto kHeads = WholeForm::kHeads, kPlain = WholeForm::kPlain;
  if (form == kHeads) return norm_forward_plain_sm90<T, kVectors, 0, false, kHeads>;
  if (form == WholeForm::kEarly) return forward_plain_of<T, kVectors, 0, WholeForm::kEarly>(layer);
  const auto of_lanes = [&](auto count) {
    return form == WholeForm::kQuant ? forward_quant_of<T, kVectors, count>(layer)
                                     : forward_plain_of<T, kVectors, count, kPlain>(layer);
  };
  if constexpr (kVectors == 4) {
    constexpr auto kHalves = WholeForm::kHalves;
    if (form == kHalves) {
      return lanes == 512 ? norm_forward_plain_sm90<T, kVectors, 512, false, kHalves>
                          : norm_forward_plain_sm90<T, kVectors, 0, false, kHalves>;
    }
    if (form == WholeForm::kPairs) return forward_pairs<T>(lanes / 32);
    // The commonest rows; of 16384 columns up to 3 % quicker than with any number of lanes.
    if (lanes == 64) return of_lanes(kNumber<64>);
    if (lanes == 128) return of_lanes(kNumber<128>);
    if (lanes == 256) return of_lanes(kNumber<256>);
    if (lanes == 512) return of_lanes(kNumber<512>);
  }
  return of_lanes(kNumber<0>);
}

// The layouts of whole rows: within warps norm_mapping() takes the fewest lanes.
template <class T>
PlainKernel forward_plain(int vectors, int lanes, bool layer, WholeForm form) {
  PlainKernel found = nullptr;
  const auto try_over = [&](auto count) {
    if (vectors == count) found = forward_plain_over<T, count>(lanes, layer, form);
  };
  const auto try_within = [&](auto of_row, auto... counts) {
    const auto try_one = [&](auto count) {
      if (vectors == count) found = forward_plain_within<T, count, of_row>(layer, form);
    };
    if (lanes == of_row) (try_one(counts), ...);
  };
  if (lanes > 32) {
    try_over(kNumber<1>);
    try_over(kNumber<2>);
    try_over(kNumber<3>);
    try_over(kNumber<4>);
  }
  try_within(kNumber<8>, kNumber<1>, kNumber<2>, kNumber<3>, kNumber<4>, kNumber<5>, kNumber<9>);
  try_within(kNumber<16>, kNumber<3>, kNumber<4>, kNumber<5>, kNumber<9>);
  try_within(kNumber<32>, kNumber<3>, kNumber<4>, kNumber<5>, kNumber<9>);
  return found;
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
  ForwardKernel forward_loose_kernel<T>(int vectors, int lanes, int sure, bool cluster,     \
                                        bool plain) {                                       \
    return plain ? forward_loose<T, true>(vectors, lanes, sure, cluster)                    \
                 : forward_loose<T, false>(vectors, lanes, sure, cluster);                  \
  }

}  // namespace ikbo::norm
