// The activations in fp32, for epilogues that round to 16 bits: within 3e-5 of the value down to
// 1e-36. NaN stays NaN, and silu, gelu and gelu_tanh of -inf are NaN as in torch (-inf * 0).
#pragma once

#include <cmath>
#include <type_traits>

#include "config/activation.h"

namespace ikbo {
namespace activation {

__device__ inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x * sigmoid(t), given t * log2(e).
__device__ inline float gate(float x, float t_log2e) { return __fdividef(x, 1 + exp2(-t_log2e)); }

// Of the two values that max.f32 has for NaN, torch's.
__device__ inline float relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

inline constexpr float kLog2e = 1.44269504f;

// x Phi(x). The tail Phi(-|x|) is exp(-x^2 / 2) times a polynomial in t = 1 / (1 + 0.2687 |x|), a
// minimax fit to 1e-6 for |x| <= 13.4, where the exponential leaves fp32.
__device__ inline float gelu(float x) {
  const float t = __fdividef(1, fmaf(0.26870058f, fabsf(x), 1));
  float polynomial = -0.06252287f;
  for (const float coefficient :
       {0.16730198f, -0.03384415f, 0.12302884f, 0.09068010f, 0.10820462f, 0.10715097f}) {
    polynomial = fmaf(polynomial, t, coefficient);
  }
  const float tail = exp2(x * x * (-0.5f * kLog2e)) * (polynomial * t);
  return x * (x < 0 ? tail : 1 - tail);
}

}  // namespace activation

template <Activation kActivation>
__device__ inline float apply(float x) {
  using namespace activation;
  if constexpr (kActivation == Activation::kRelu) return relu(x);
  if constexpr (kActivation == Activation::kRelu2) return relu(x) * relu(x);
  if constexpr (kActivation == Activation::kSilu) return gate(x, kLog2e * x);
  if constexpr (kActivation == Activation::kGelu) return gelu(x);
  if constexpr (kActivation == Activation::kGeluTanh) {
    constexpr float kScale = 2 * 0.79788456f * kLog2e;  // tanh(u) = 2 sigmoid(2u) - 1
    return gate(x, x * fmaf(kScale * 0.044715f, x * x, kScale));
  }
  if constexpr (kActivation == Activation::kSigmoid) return gate(1, kLog2e * x);
  return x;
}

// body(std::integral_constant<Activation, ...>) for a run-time activation: one branch around all of
// the elements that the body goes through.
template <class Body>
__device__ inline void with_activation(Activation activation, Body body) {
  const auto run = [&]<Activation kActivation>() {
    body(std::integral_constant<Activation, kActivation>{});
  };
  // The usual case first: the switch costs a hundred clocks.
  if (activation == Activation::kNone) return run.template operator()<Activation::kNone>();
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return run.template operator()<Activation::kRelu>();
    case Activation::kRelu2:
      return run.template operator()<Activation::kRelu2>();
    case Activation::kSilu:
      return run.template operator()<Activation::kSilu>();
    case Activation::kGelu:
      return run.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh:
      return run.template operator()<Activation::kGeluTanh>();
    case Activation::kSigmoid:
      return run.template operator()<Activation::kSigmoid>();
  }
}

}  // namespace ikbo
