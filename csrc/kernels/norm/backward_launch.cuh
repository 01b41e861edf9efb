// Which compiled backward a config takes, for one type of x.
#pragma once

#include "kernels/norm/backward_loose_sm90.cuh"
#include "kernels/norm/backward_rows_sm90.cuh"
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
  if constexpr (!kFull) {
    if (vectors <= 4) return norm_backward_sm90<T, 4, true, false>;
  }
  return norm_backward_sm90<T, 9, true, kFull>;
}

template <class T, bool kFull>
BackwardKernel backward_over_warps(int vectors) {
  return pick_over_warps<kFull>(vectors, [](auto count) -> BackwardKernel {
    return norm_backward_sm90<T, count, false, kFull>;
  });
}

template <class T>
BackwardKernel backward_loose(int vectors, int lanes) {
  if (lanes > 32) return norm_backward_loose_sm90<T, 2, 0>;
  return pick_loose(vectors, lanes, [](auto count, auto of_row) -> BackwardKernel {
    return norm_backward_loose_sm90<T, count, of_row>;
  });
}

// Null where there is none.
template <class T, bool kSums>
BackwardKernel backward_rows(int vectors, int lanes, int slots) {
  // More take more registers than there are. Without sums of grad_y those of several rows a warp
  // are 3 % quicker in the other kernel.
  constexpr int kMost = 28;
  if (slots > kMost) return nullptr;
  return pick_loose(vectors, lanes, [](auto count, auto of_row) -> BackwardKernel {
    constexpr int kSlots = count * 16 / sizeof(T);
    if constexpr (!kSums && of_row < 32) {
      return nullptr;
    } else {
      return norm_backward_rows_sm90<T, count, of_row, kSums, (kSlots < kMost ? kSlots : kMost)>;
    }
  });
}

#define IKBO_NORM_BACKWARD(T)                                                                     \
  template <>                                                                                     \
  BackwardKernel backward_kernel<T>(int vectors, bool in_warp, bool full) {                       \
    if (in_warp) {                                                                                \
      return full ? backward_in_warp<T, true>(vectors) : backward_in_warp<T, false>(vectors);     \
    }                                                                                             \
    return full ? backward_over_warps<T, true>(vectors) : backward_over_warps<T, false>(vectors); \
  }                                                                                               \
  template <>                                                                                     \
  BackwardKernel backward_loose_kernel<T>(int vectors, int lanes) {                               \
    return backward_loose<T>(vectors, lanes);                                                     \
  }                                                                                               \
  template <>                                                                                     \
  BackwardKernel backward_rows_kernel<T>(int vectors, int lanes, int slots, bool sums) {          \
    return sums ? backward_rows<T, true>(vectors, lanes, slots)                                   \
                : backward_rows<T, false>(vectors, lanes, slots);                                 \
  }

}  // namespace ikbo::norm
