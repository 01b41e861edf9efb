// What the forwards of whole rows exchange over the warps of a CTA: a row lies in one CTA, and its
// warps have equally many columns. In the order of exchange() with Moments, so the bits are the
// same, in a third fewer instructions.
#pragma once

#include "kernels/norm/compiled.h"
#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

// Over kWidth lanes, for all of them.
template <int kWidth>
__device__ inline float sum_of_lanes(float value) {
#pragma unroll
  for (int offset = kWidth / 2; offset >= 1; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// Of a warp's values, numbers without a sign, or NaN: in one instruction.
__device__ inline float max_of_warp(float value) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(value)));
}

// merge(width, part, exists) of the parts of all warps, which repeat themselves every `width` lanes,
// a constant; zeros where there is no warp, which change no sum. One barrier.
template <class Merge>
__device__ inline float2 merge_warps(float2 (&of_warp)[kMaxWarps], int warps, float2 own,
                                     const Merge& merge) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) of_warp[warp] = own;
  __syncthreads();
  const auto merge_of = [&](auto width) {
    const int peer = lane & (width - 1);
    const bool exists = peer < warps;
    return merge(width, exists ? of_warp[peer] : float2{0.0f, 0.0f}, exists);
  };
  return warps <= 4 ? merge_of(kNumber<4>) : merge_of(kNumber<kMaxWarps>);
}

// A part is a warp's: of kColumns columns, their sum and the sum of squared deviations from their
// mean, which is made again from the sum. Returns the row's mean and sum of squared deviations.
template <int kWidth, int kColumns>
__device__ inline float2 merge_moments(float2 part, bool exists, float per_column) {
  const float mean = __fmul_rn(sum_of_lanes<kWidth>(part.x), per_column);
  const float away = __fmul_rn(part.x, 1.0f / kColumns) - mean;
  const float squares = fmaf(__fmul_rn(static_cast<float>(kColumns), away), away, part.y);
  return {mean, sum_of_lanes<kWidth>(exists ? squares : 0.0f)};
}

}  // namespace ikbo::norm
