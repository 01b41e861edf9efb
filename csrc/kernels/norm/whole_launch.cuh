// The kernel of each layout of whole rows, for one type of x.
#pragma once

#include <array>
#include <utility>

#include "kernels/norm/backward_whole_sm90.cuh"
#include "kernels/norm/backward_wide_sm90.cuh"

namespace ikbo::norm {

template <class T, int kIndex, bool kSums>
constexpr WholeKernel whole_kernel_at() {
  constexpr NormWhole kLayout = norm_detail::kWholeLayouts[kIndex];
  if constexpr (kLayout.wide) {
    return norm_backward_wide_sm90<T, kLayout.lanes, kLayout.vectors, kSums>;
  } else {
    return norm_backward_whole_sm90<T, kLayout.lanes, kLayout.vectors, kSums>;
  }
}

template <class T, int... kIndices>
WholeKernel find_whole_kernel(const NormWhole& whole, std::integer_sequence<int, kIndices...>) {
  const WholeKernel kernels[][2] = {
      {whole_kernel_at<T, kIndices, false>(), whole_kernel_at<T, kIndices, true>()}...};
  for (int i = 0; i < static_cast<int>(sizeof...(kIndices)); ++i) {
    const NormWhole& layout = norm_detail::kWholeLayouts[i];
    if (layout.lanes == whole.lanes && layout.vectors == whole.vectors) {
      return kernels[i][whole.sums];
    }
  }
  return nullptr;
}

#define IKBO_NORM_WHOLE(T)                                                           \
  template <>                                                                        \
  WholeKernel whole_kernel<T>(const NormWhole& whole) {                              \
    constexpr int kLayouts = static_cast<int>(norm_detail::kWholeLayouts.size());    \
    return find_whole_kernel<T>(whole, std::make_integer_sequence<int, kLayouts>()); \
  }

}  // namespace ikbo::norm
