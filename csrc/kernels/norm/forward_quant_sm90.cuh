// The forward of whole aligned rows with y in e4m3: as norm_forward_plain_sm90, but a thread has
// registers for its results in fp32, which wait there for the row's scale.
//
// A row without a bias and a mean needs one exchange: its largest |x * weight| travels with the
// sum. Weights are loaded with x then.
#pragma once

#include "kernels/norm/forward_whole_sm90.cuh"

namespace ikbo::norm {

// scale_of_row(), and 1 over a scale, bit for bit (tried with every float), without the branches of
// divisions, which are for what no row has. (Kernels with more options would take more registers.)
struct RowScale {
  float scale, inverse;

  __device__ explicit RowScale(float largest) {
    constexpr float kInverse = 1.0f / 448.0f;
    // What is left is NaN, which fminf() drops, where `largest` is Inf.
    float about = __fmul_rn(largest, kInverse), left = fmaf(about, -448.0f, largest);
    scale = max_or_nan(fmaf(fminf(left, 3.4e38f), kInverse, about), 1.17549435e-38f);
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(about) : "f"(scale));
    left = fmaf(-scale, about, 1.0f);
    inverse = fmaf(about, fminf(left, 1.0f), about);
  }
};

// The largest |value| of a thread's vectors, or NaN. Numbers without a sign are in order as
// integers, and NaN is beyond all: so two pairs take three instructions.
struct LargestValue {
  uint32_t of[2] = {};

  template <int kVector>
  __device__ void add(const float (&values)[kVector]) {
    const auto pair = [&](int e) {
      return __float_as_uint(max_or_nan(fabsf(values[e]), fabsf(values[e + 1])));
    };
#pragma unroll
    for (int e = 0; e < kVector; e += 4) of[e / 4] = __vimax3_u32(of[e / 4], pair(e), pair(e + 2));
  }
  __device__ float get() const { return __uint_as_float(max(of[0], of[1])); }
};

template <int kVectors>
inline constexpr int kQuantRegisters = kVectors > 5   ? 168
                                       : kVectors > 4 ? 96
                                       : kVectors > 3 ? 64
                                                      : 56;

// kLanes: a row's threads, or 0 over any number of warps.
template <class T, int kVectors, int kLanes, bool kLayer>
__global__ void __maxnreg__((kQuantRegisters<kVectors>))
    norm_forward_quant_sm90(const __grid_constant__ PlainForward p) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr bool kInWarp = kLanes > 0 && kLanes <= 32;
  hopper::touch(p);
  hopper::wait_for_previous_kernel();
  hopper::allow_next_kernel();
  const WholeRow<kInWarp> at(blockIdx.x, p.rows, kLanes);
  // Vectors lie `step` bytes from one another; without a sign addresses take fewer instructions.
  const int lanes = kLanes > 0 ? kLanes : blockDim.x;
  const uint32_t step = 16 * lanes;
  uint32_t first = 16 * at.thread;

  const char* const from = p.x + uint64_t{at.row} * p.x_bytes + first;
  const char* const weights = p.weight + first;
  const char* const biases = p.bias + first;
  Words<4> x[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) x[v] = load_words<4>(from + v * step);
  [[maybe_unused]] Words<4> weight[kVectors];
  if constexpr (!kLayer) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) weight[v] = load_words<4>(weights + v * step);
  }
  float values[kVectors][kVector];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) unpack_words<T>(x[v], values[v]);

  // In the order of ForwardRow, so the bits are the same.
  constexpr int kShuffled = kInWarp ? kLanes : 32;
  constexpr float kPartColumns = 32.0f * kVectors * kVector;  // over warps: of a warp
  const auto largest_of_lanes = [](float value) {
    return kShuffled == 32 ? max_of_warp(value) : max_lanes(value, kShuffled);
  };
  __shared__ float2 of_warp[kMaxWarps];
  float sum = 0.0f, mean = 0.0f;
  if constexpr (kLayer) {
    sum = sum_of_elements(values, [](float value, float sum) { return sum + value; });
    sum = sum_lanes<kShuffled>(sum, kShuffled);
    mean = __fmul_rn(sum, kInWarp ? p.per_column : 1.0f / kPartColumns);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) values[v][e] -= mean;
    }
  }
  float squares =
      sum_of_elements(values, [](float value, float sum) { return fmaf(value, value, sum); });
  squares = sum_lanes<kShuffled>(squares, kShuffled);
  float of_row = mean, largest = 0.0f;
  LargestValue found;
  if constexpr (kLayer) {
    if constexpr (!kInWarp) {
      const float2 whole =
          exchange_warps<true>(of_warp, lanes / 32, {sum, squares}, kPartColumns, p.per_column);
      of_row = whole.x, squares = whole.y;
    }
  } else {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float w[kVector];
      unpack_words<T>(weight[v], w);
#pragma unroll
      for (int e = 0; e < kVector; ++e) values[v][e] = __fmul_rn(values[v][e], w[e]);
      found.add(values[v]);
    }
    largest = largest_of_lanes(found.get());
    if constexpr (!kInWarp) {
      const float2 whole = exchange_warps<false, true>(of_warp, lanes / 32, {largest, squares},
                                                       kPartColumns, p.per_column);
      largest = whole.x, squares = whole.y;
    }
  }
  const float rstd = rsqrtf(fmaf(squares, p.per_column, p.eps));

  const bool tells = at.thread == 0 && at.exists;
  if (tells) {
    if (kLayer && p.mean) p.mean[at.row] = of_row;
    if (p.rstd) p.rstd[at.row] = rstd;
  }

  if constexpr (kLayer) {
    const float shift = (mean - of_row) * rstd;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float w[kVector], b[kVector];
      unpack_words<T>(load_words<4>(weights + v * step), w);
      unpack_words<T>(load_words<4>(biases + v * step), b);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        float& value = values[v][e];
        value = kInWarp ? value * rstd : fmaf(value, rstd, shift);
        value = fmaf(value, w[e], b[e]);
      }
      found.add(values[v]);
    }
    largest = largest_of_lanes(found.get());
    if constexpr (!kInWarp) {
      __shared__ float largest_of_warp[kMaxWarps];
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      if (lane == 0) largest_of_warp[warp] = largest;
      __syncthreads();
      largest = max_of_warp(lane < lanes / 32 ? largest_of_warp[lane] : 0.0f);
    }
  }
  const RowScale scale(kLayer ? largest : largest * rstd);
  const float factor = kLayer ? scale.inverse : scaled_root(rstd, scale.inverse);
  if (tells) p.row_scales[at.row] = scale.scale;
  asm volatile("" : "+r"(first));
  char* const to = p.y + uint64_t{at.row} * p.y_bytes + first * kVector / 16;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) values[v][e] = __fmul_rn(values[v][e], factor);
    if (at.exists) {
      store_words<false>(to + v * (step * kVector / 16), pack_words<E4m3>(values[v]));
    }
  }
}

}  // namespace ikbo::norm
