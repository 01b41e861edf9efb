// The running softmax of a consumer's 64 query rows, relative to a reference a row: its maximum, or
// up to 2^kSlack less, so that what is summed already is seldom rescaled. A thread holds two rows,
// `upper` l / 4 of its warp's sixteen and `lower` 8 further; four neighbouring lanes share a row's
// keys. Scores as wgmma leaves them: scores[4j], [4j+1] of the upper row, [4j+2], [4j+3] of the
// lower.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/activation.cuh"

namespace ikbo::attention {

class Softmax {
 public:
  // Scores times |scale| are exponents of e; of 2 with log2(e) in the factor. A scale of 0 becomes
  // a tiny one, or a masked key's -inf would be NaN.
  __device__ explicit Softmax(float scale)
      : factor_(fmaxf(fabsf(scale) * kLog2e, 1e-30f)), negate_(scale < 0) {}

  __device__ void start() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      reference_[row] = -INFINITY;
      sum_[row] = 0;
    }
  }

  // Scores of the next `keys` keys become weights relative to the reference, those beyond 0.
  // Returns by what results so far must be multiplied, for either row: 1 where the reference stays.
  template <int kScores>
  __device__ float2 update(float (&scores)[kScores], int32_t keys) {
    if (negate_) {
#pragma unroll
      for (float& score : scores) score = -score;
    }
    if (keys < kScores * 2) {
      const int32_t mine = keys - threadIdx.x % 4 * 2;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (i / 4 * 8 + i % 2 >= mine) scores[i] = -INFINITY;
      }
    }
    float correction[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float maximum = reference_[row];
#pragma unroll
      for (int i = 2 * row; i < kScores; i += 4) {
        maximum = fmaxf(maximum, fmaxf(scores[i], scores[i + 1]));
      }
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
      const bool grows = (maximum - reference_[row]) * factor_ > kSlack;
      correction[row] = grows ? activation::exp2((reference_[row] - maximum) * factor_) : 1;
      if (grows) reference_[row] = maximum;
      // All masked so far: no weight, rather than exp(-inf - -inf).
      const float offset = reference_[row] == -INFINITY ? 0 : reference_[row] * factor_;
      float sum = 0;
#pragma unroll
      for (int i = 2 * row; i < kScores; i += 4) {
#pragma unroll
        for (int k = i; k < i + 2; ++k) {
          scores[k] = activation::exp2(fmaf(scores[k], factor_, -offset));
          sum += scores[k];
        }
      }
      sum_[row] = sum_[row] * correction[row] + sum;  // the thread's own share
    }
    return {correction[0], correction[1]};
  }

  // By what results must be multiplied in the end, and the logarithm of the sum of exponentials.
  __device__ float2 finish(float (&logsumexp)[2]) {
    float reciprocal[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum = sum_[row];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      reciprocal[row] = __fdividef(1, sum);
      logsumexp[row] = reference_[row] * factor_ * (1 / kLog2e) + __logf(sum);
    }
    return {reciprocal[0], reciprocal[1]};
  }

 private:
  static constexpr float kLog2e = activation::kLog2e;
  static constexpr float kSlack = 8;  // weights up to 256: exact in fp16 as well
  float factor_;
  bool negate_;
  float reference_[2];
  float sum_[2];
};

}  // namespace ikbo::attention
