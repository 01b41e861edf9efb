// What the backward's kernels for whole, aligned rows of one type share.
#pragma once

#include "config/norm_backward.h"
#include "hopper/async_copy.cuh"
#include "hopper/dependent_launch.cuh"
#include "kernels/norm/compiled.h"
#include "kernels/norm/pace.cuh"
#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

// The sums of kCount values, a power of two, over kLanes lanes. Lanes hand on what others add up:
// value i is then in the i-th of kCount equal parts of the lanes. In the order of sum_lanes.
template <int kLanes, int kCount>
__device__ inline float sum_each(float (&values)[kCount]) {
  const int lane = threadIdx.x % 32;
  int offset = kLanes / 2;
#pragma unroll
  for (int half = kCount / 2; half >= 1; half /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float own = upper ? values[i + half] : values[i];
      const float other = upper ? values[i] : values[i + half];
      values[i] = own + __shfl_xor_sync(0xffffffffu, other, offset);
    }
    offset /= 2;
  }
#pragma unroll
  for (; offset >= 1; offset /= 2) values[0] += __shfl_xor_sync(0xffffffffu, values[0], offset);
  return values[0];
}

// Of those values of kWarps warps, one after the other in `parts`, the sums over warps: value i in
// lane i. In the order of exchange().
template <int kWarps, int kCount>
__device__ inline float sum_parts(const float* parts) {
  constexpr int kAll = kWarps * kCount;
  constexpr int kWidth = kAll <= 4 ? 4 : kAll <= 8 ? 8 : kAll <= 16 ? 16 : 32;
  const int lane = threadIdx.x % 32;
  float sum = kAll >= 32 || lane < kAll ? parts[lane] : 0.0f;
  if constexpr (kAll > 32) sum += parts[lane + 32];
#pragma unroll
  for (int offset = kWidth / 2; offset >= kCount; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  return sum;
}

}  // namespace ikbo::norm
