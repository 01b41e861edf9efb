// linear_act into few features, as the last layer of a ranking model is: a warp a row. Its lanes
// read 16 bytes of the row each, and the weights, which all rows share, stay in L1.
#pragma once

#include "hopper/dependent_launch.cuh"
#include "kernels/activation.cuh"
#include "kernels/gated/gated.h"
#include "kernels/numeric.cuh"

namespace ikbo::gated {

inline constexpr int kNarrowThreads = 256;
inline constexpr int kRowsACta = kNarrowThreads / 32;

struct NarrowParams {
  const void* x;  // [M, K] in T, rows of 8-element multiples, 16-byte aligned; likewise w
  const void* w;  // [N, K], N <= kMaxNarrowFeatures
  const void* bias;
  void* out;     // [M, N], any row stride
  void* preact;  // [M, N] contiguous, or null
  int64_t x_stride, w_stride, out_stride;
  int64_t M;
  int32_t N, K;
  Activation activation;
};

// The product of eight neighbours on either side.
template <class T>
__device__ inline float dot_of_chunks(const uint4& a, const uint4& b, float sum) {
  const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 l = unpack<T>(left[i]), r = unpack<T>(right[i]);
    sum = fmaf(l.x, r.x, sum), sum = fmaf(l.y, r.y, sum);
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kNarrowThreads) narrow_sm90(const NarrowParams p) {
  constexpr int kChunk = 8;
  hopper::wait_for_previous_kernel();
  hopper::allow_next_kernel();
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * kRowsACta + threadIdx.x / 32;
  if (row >= p.M) return;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* w = static_cast<const T*>(p.w);
  float sums[kMaxNarrowFeatures] = {};
  const int full_K = p.K / kChunk * kChunk;
  for (int k = kChunk * lane; k < full_K; k += 32 * kChunk) {
    const uint4 of_x = *reinterpret_cast<const uint4*>(x + k);
#pragma unroll
    for (int n = 0; n < kMaxNarrowFeatures; ++n) {
      if (n >= p.N) break;
      const uint4 of_w = *reinterpret_cast<const uint4*>(w + n * p.w_stride + k);
      sums[n] = dot_of_chunks<T>(of_x, of_w, sums[n]);
    }
  }
  if (full_K + lane < p.K) {
    const int k = full_K + lane;
    const float of_x = static_cast<float>(x[k]);
#pragma unroll
    for (int n = 0; n < kMaxNarrowFeatures; ++n) {
      if (n < p.N) sums[n] = fmaf(of_x, static_cast<float>(w[n * p.w_stride + k]), sums[n]);
    }
  }
  float mine = 0;  // lane n finishes feature n
#pragma unroll
  for (int n = 0; n < kMaxNarrowFeatures; ++n) {
    if (n >= p.N) break;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sums[n] += __shfl_xor_sync(0xffffffffu, sums[n], distance);
    }
    if (lane == n) mine = sums[n];
  }
  if (lane >= p.N) return;
  if (p.bias != nullptr) mine += static_cast<float>(static_cast<const T*>(p.bias)[lane]);
  if (p.preact != nullptr) static_cast<T*>(p.preact)[row * p.N + lane] = static_cast<T>(mine);
  with_activation(p.activation,
                  [&](auto activation) { mine = apply<decltype(activation)::value>(mine); });
  static_cast<T*>(p.out)[row * p.out_stride + lane] = static_cast<T>(mine);
}

}  // namespace ikbo::gated
