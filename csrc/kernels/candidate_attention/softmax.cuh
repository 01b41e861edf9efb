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

// 2^x on the FMA pipe, to 1e-4 for x <= 126 and 0 in effect below -126: 2^n, n the nearest integer,
// by adding it to an exponent, times a polynomial in x - n. NaN stays NaN.
__device__ inline float exp2_polynomial(float x) {
  constexpr float kInteger = 12582912;  // 1.5 * 2^23: a sum's lowest bits are the integer's
  asm("max.NaN.f32 %0, %0, 0fC2FC0000;" : "+f"(x));  // -126
  const float shifted = x + kInteger;
  const float t = x - (shifted - kInteger);
  const float p = fmaf(t, fmaf(t, fmaf(t, 0.05517134f, 0.24261034f), 0.69326097f), 0.99992812f);
  return p * __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
}

template <int kScores, int kPolynomials>
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
  template <int kMade = kScores>  // of the scores; the others become 0
  __device__ float2 update(float (&scores)[kScores], int32_t keys) {
    static_assert(kMade % 4 == 0);
    if (negate_) {
#pragma unroll
      for (int i = 0; i < kMade; ++i) scores[i] = -scores[i];
    }
    if (keys < kMade * 2) {
      const int32_t mine = keys - threadIdx.x % 4 * 2;
#pragma unroll
      for (int i = 0; i < kMade; ++i) {
        if (i / 4 * 8 + i % 2 >= mine) scores[i] = -INFINITY;
      }
    }
    float correction[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float maximum = reference_[row];
#pragma unroll
      for (int i = 2 * row; i < kMade; i += 4) {
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
      for (int i = 2 * row; i < kMade; i += 4) {
#pragma unroll
        for (int k = i; k < i + 2; ++k) {
          const float x = fmaf(scores[k], factor_, -offset);
          scores[k] = i / 4 % 4 < kPolynomials ? exp2_polynomial(x) : activation::exp2(x);
          sum += scores[k];
        }
      }
      sum_[row] = sum_[row] * correction[row] + sum;  // the thread's own share
    }
#pragma unroll
    for (int i = kMade; i < kScores; ++i) scores[i] = 0;
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
