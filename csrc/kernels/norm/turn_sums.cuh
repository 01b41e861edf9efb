// The sums over columns that the backward needs of a turn, which is one row or two at once: over
// lanes, over a CTA's warps and over a cluster's CTAs.
#pragma once

#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

// Of a turn's rows, the sums of g * xhat and of g: .x and .y of the first, .z and .w of the second.
struct TurnSums {
  bool layer, pair;

  // Over lanes, for all of them.
  template <int kMost>
  __device__ float4 over(float4 part, int width) const {
    const auto sum_both = [width](float& a, float& b) {
      const float2 both = sum_lanes<kMost>(float2{a, b}, width);
      a = both.x, b = both.y;
    };
    if (layer) {
      sum_both(part.x, part.y);
      if (pair) sum_both(part.z, part.w);
    } else if (pair) {
      sum_both(part.x, part.z);
    } else {
      part.x = sum_lanes<kMost>(part.x, width);
    }
    return part;
  }
  // Of a cluster's CTAs.
  __device__ float4 operator()(float4 part, int width, bool = false) const {
    return over<kMaxWarps>(part, width);
  }
};

// Over a warp: x in lanes 0 to 7, y in 8 to 15, z and w. Lanes hand on what others add up, which
// takes 6 shuffles in place of 20. In the order of sum_lanes.
__device__ inline float sum_each(const float4& part) {
  const int lane = threadIdx.x % 32;
  const bool upper = lane & 16, odd = lane & 8;
  const auto other = [](float value, int offset) {
    return __shfl_xor_sync(0xffffffffu, value, offset);
  };
  const float first = (upper ? part.z : part.x) + other(upper ? part.x : part.z, 16);
  const float second = (upper ? part.w : part.y) + other(upper ? part.y : part.w, 16);
  float sum = (odd ? second : first) + other(odd ? first : second, 8);
#pragma unroll
  for (int offset = 4; offset >= 1; offset /= 2) sum += other(sum, offset);
  return sum;
}

// The sums of two rows over a CTA's warps and a cluster's CTAs: exchange() with fewer shuffles.
template <class Between>
__device__ inline float4 exchange_pair(Exchange& shared, uint32_t& turn, int cluster,
                                       const float4& part, const TurnSums& merge,
                                       const Between& between) {
  const uint32_t buffer = turn & 1, phase = turn >> 1 & 1;
  ++turn;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  float* const of_warp = &shared.of_warp[buffer][0].x;
  float sum = sum_each(part);
  if (lane % 8 == 0) of_warp[threadIdx.x / 32 * 4 + lane / 8] = sum;
  __syncthreads();
  between();
  // Value lane % 4 of warp lane / 4, and of the one 8 warps on.
  sum = lane < 4 * warps ? of_warp[lane] : 0.0f;
  if (warps > 8) sum += lane + 32 < 4 * warps ? of_warp[lane + 32] : 0.0f;
#pragma unroll
  for (int offset = 16; offset >= 4; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  const auto value = [&](int i) { return __shfl_sync(0xffffffffu, sum, i); };
  const float4 sums{value(0), value(1), value(2), value(3)};
  return cluster == 1 ? sums : exchange_ctas(shared, buffer, phase, cluster, sums, merge);
}

}  // namespace ikbo::norm
