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

// Phi(x), given exp(-x^2 / 2). The tail Phi(-|x|) is that times a polynomial in
// t = 1 / (1 + 0.2687 |x|), a minimax fit to 1e-6 for |x| <= 13.4, where the exponential leaves
// fp32.
__device__ inline float normal_below(float x, float exponential) {
  const float t = __fdividef(1, fmaf(0.26870058f, fabsf(x), 1));
  float polynomial = -0.06252287f;
  for (const float coefficient :
       {0.16730198f, -0.03384415f, 0.12302884f, 0.09068010f, 0.10820462f, 0.10715097f}) {
    polynomial = fmaf(polynomial, t, coefficient);
  }
  const float tail = exponential * (polynomial * t);
  return x < 0 ? tail : 1 - tail;
}
__device__ inline float normal_exponential(float x) { return exp2(x * x * (-0.5f * kLog2e)); }

// gelu_tanh is x sigmoid(2u): kTanhScale times x (1 + 0.044715 x^2) is 2u log2(e).
inline constexpr float kTanhScale = 2 * 0.79788456f * kLog2e;
inline constexpr float kTanhCube = 0.044715f;

}  // namespace activation

template <Activation kActivation>
__device__ inline float apply(float x) {
  using namespace activation;
  if constexpr (kActivation == Activation::kRelu) return relu(x);
  if constexpr (kActivation == Activation::kRelu2) return relu(x) * relu(x);
  if constexpr (kActivation == Activation::kSilu) return gate(x, kLog2e * x);
  if constexpr (kActivation == Activation::kGelu) {
    return x * normal_below(x, normal_exponential(x));
  }
  if constexpr (kActivation == Activation::kGeluTanh) {
    return gate(x, x * fmaf(kTanhScale * kTanhCube, x * x, kTanhScale));  // tanh by sigmoid
  }
  if constexpr (kActivation == Activation::kSigmoid) return gate(1, kLog2e * x);
  return x;
}

struct ActivationGrad {
  float value;  // act(x)
  float grad;   // grad * act'(x)
};

// The backward, with the value at x that a gated one needs beside it.
template <Activation kActivation>
__device__ inline ActivationGrad backward(float x, float grad) {
  using namespace activation;
  if constexpr (kActivation == Activation::kRelu) return {relu(x), x <= 0 ? 0 : grad};
  if constexpr (kActivation == Activation::kRelu2) {
    const float positive = relu(x);
    return {positive * positive, grad * (2 * positive)};
  }
  if constexpr (kActivation == Activation::kSilu) {
    const float sigmoid = gate(1, kLog2e * x);
    return {x * sigmoid, grad * (sigmoid * fmaf(x, 1 - sigmoid, 1))};
  }
  if constexpr (kActivation == Activation::kGelu) {
    const float exponential = normal_exponential(x), below = normal_below(x, exponential);
    return {x * below, grad * fmaf(0.39894228f * x, exponential, below)};
  }
  if constexpr (kActivation == Activation::kGeluTanh) {
    const float square = x * x;
    const float sigmoid = gate(1, x * fmaf(kTanhScale * kTanhCube, square, kTanhScale));
    constexpr float kSlope = kTanhScale / kLog2e;  // of 2u at 0
    const float slope = fmaf(3 * kSlope * kTanhCube, square, kSlope);
    return {x * sigmoid, grad * (sigmoid * fmaf(x * slope, 1 - sigmoid, 1))};
  }
  if constexpr (kActivation == Activation::kSigmoid) {
    const float sigmoid = gate(1, kLog2e * x);
    return {sigmoid, grad * (sigmoid * (1 - sigmoid))};
  }
  return {x, grad};
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
