// The forward of whole aligned rows with y in e4m3: as norm_forward_plain_sm90, but a thread has
// registers for its results in fp32, which wait there for the row's scale.
//
// A row without a bias and a mean needs one exchange: its largest |x * weight| travels with the
// sum. Weights are loaded with x then.
#pragma once

#include "kernels/norm/forward_whole_sm90.cuh"

namespace ikbo::norm {

// Of numbers without a sign, or NaN, over a warp: in one instruction.
__device__ inline float max_of_warp(float value) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(value)));
}

template <int kVectors>
inline constexpr int kQuantRegisters = kVectors > 5   ? 168
                                       : kVectors > 4 ? 96
                                       : kVectors > 3 ? 64
                                                      : 56;

template <class T, int kVectors, bool kInWarp, bool kLayer>
__global__ void __maxnreg__((kQuantRegisters<kVectors>))
    norm_forward_quant_sm90(const __grid_constant__ NormForward p,
                            const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  __shared__ Exchange shared;
  const NormMapping& m = config.mapping;
  begin(p, config);
  hopper::allow_next_kernel();
  const WholeRow<kInWarp> row(blockIdx.x, static_cast<uint32_t>(p.rows), m.lanes);
  const int step = m.lanes * kVector;
  int first = row.thread * kVector;  // element of a row

  float values[kVectors][kVector];
  const auto load = [&](const NormMatrix& m, uint32_t row, int v) {
    return load_words<4>(static_cast<const char*>(m.data) + row * m.row_bytes +
                         (first + v * step) * static_cast<int>(sizeof(T)));
  };
  Words<4> x[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) x[v] = load(p.x, row.row, v);
  [[maybe_unused]] Words<4> weight[kVectors];
  if constexpr (!kLayer) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) weight[v] = load(p.weight, 0, v);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) unpack_words<T>(x[v], values[v]);

  // In the order of ForwardRow, so the bits are the same.
  const int lanes = kInWarp ? m.lanes : 32;
  constexpr float kPartColumns = 32.0f * kVectors * kVector;  // over warps: of a warp
  uint32_t turn = 0;
  float sum = 0.0f, mean = 0.0f;  // or, without a mean, the largest product
  if constexpr (kLayer) {
    sum = sum_of_elements(values, [](float value, float sum) { return sum + value; });
    sum = sum_lanes(sum, lanes);
    mean = __fmul_rn(sum, kInWarp ? config.per_column : 1.0f / kPartColumns);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) values[v][e] -= mean;
    }
  }
  float squares =
      sum_of_elements(values, [](float value, float sum) { return fmaf(value, value, sum); });
  const auto largest_of_values = [&] {
    float largest[4] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        largest[e % 4] = max_or_nan(largest[e % 4], fabsf(values[v][e]));
      }
    }
    return max_or_nan(max_or_nan(largest[0], largest[1]), max_or_nan(largest[2], largest[3]));
  };
  if constexpr (!kLayer) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float w[kVector];
      unpack_words<T>(weight[v], w);
#pragma unroll
      for (int e = 0; e < kVector; ++e) values[v][e] = __fmul_rn(values[v][e], w[e]);
    }
    const float largest = largest_of_values();
    sum = kInWarp ? max_lanes(largest, lanes) : max_of_warp(largest);
  }
  squares = sum_lanes(squares, lanes);
  float of_row = mean;
  if constexpr (!kInWarp) {
    const Moments merge{kLayer, !kLayer, config.per_cta_column, config.per_column};
    const float4 whole =
        exchange(shared, turn, 1, {sum, squares, kPartColumns, mean}, merge, [] {});
    sum = whole.x;
    squares = whole.y;
    if constexpr (kLayer) of_row = whole.w;
  }
  const float rstd = rsqrtf(fmaf(squares, config.per_column, p.eps));

  float scale, factor;
  if constexpr (kLayer) {
    const float shift = (mean - of_row) * rstd;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float w[kVector], b[kVector];
      unpack_words<T>(load(p.weight, 0, v), w);
      unpack_words<T>(load(p.bias, 0, v), b);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        float& value = values[v][e];
        value = kInWarp ? value * rstd : fmaf(value, rstd, shift);
        value = fmaf(value, w[e], b[e]);
      }
    }
    float largest = largest_of_values();
    if constexpr (kInWarp) {
      largest = max_lanes(largest, lanes);
    } else {
      __shared__ float largest_of[kMaxWarps];
      largest = max_of_warp(largest);
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      if (lane == 0) largest_of[warp] = largest;
      __syncthreads();
      largest = max_of_warp(lane < m.warps ? largest_of[lane] : 0.0f);
    }
    scale = scale_of_row(largest);
    factor = 1.0f / scale;
  } else {
    scale = scale_of_row(sum * rstd);
    factor = scaled_root(rstd, scale);
  }
  if (row.thread == 0 && row.exists) {
    if (kLayer && p.mean) p.mean[row.row] = of_row;
    if (p.rstd) p.rstd[row.row] = rstd;
    p.row_scales[row.row] = scale;
  }
  asm volatile("" : "+r"(first));
  char* const to = static_cast<char*>(p.y.data) + row.row * p.y.row_bytes + first;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) values[v][e] = __fmul_rn(values[v][e], factor);
    if (row.exists) store_words<false>(to + v * step, pack_words<E4m3>(values[v]));
  }
}

}  // namespace ikbo::norm
