// Rows longer than a cluster holds: a CTA a row, read from memory once for every sum and result.
#pragma once

#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

inline constexpr int kLoopedThreads = 512;

// A row of a group.
struct Row {
  int64_t row;
  int group;
};

__device__ inline char* row_of(const NormMatrix& m, Row at) {
  return static_cast<char*>(m.data) + at.group * m.group_bytes + at.row * m.row_bytes;
}
__device__ inline float load_element(const NormMatrix& m, Row at, int64_t column) {
  float value = 0.0f;
  with_type<float>(m.type, [&](auto zero) {
    value = static_cast<float>(reinterpret_cast<const decltype(zero)*>(row_of(m, at))[column]);
  });
  return value;
}
__device__ inline void store_element(const NormMatrix& m, Row at, int64_t column, float value) {
  with_type<float>(m.type, [&](auto zero) {
    using T = decltype(zero);
    reinterpret_cast<T*>(row_of(m, at))[column] = static_cast<T>(value);
  });
}

// Over the threads of the CTA, for all of them.
template <class Merge>
__device__ inline float merge_cta(float value, float (&shared)[kLoopedThreads / 32],
                                  const Merge& merge) {
  value = merge_lanes(value, 32, merge);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (int w = 1; w < kLoopedThreads / 32; ++w) value = merge(value, shared[w]);
  __syncthreads();
  return value;
}

// term(column) summed over a row: in 64 parts a thread, whose sums are added in turn, so that the
// error of a long sum in fp32 stays small.
template <class Term>
__device__ inline float sum_row(int64_t columns, float (&shared)[kLoopedThreads / 32],
                                const Term& term) {
  constexpr int64_t kPart = int64_t{64} * kLoopedThreads;
  float sum = 0.0f;
  for (int64_t first = 0; first < columns; first += kPart) {
    float part = 0.0f;
    const int64_t end = min(first + kPart, columns);
#pragma unroll 4
    for (int64_t c = first + threadIdx.x; c < end; c += kLoopedThreads) part += term(c);
    sum += part;
  }
  return merge_cta(sum, shared, [](float a, float b) { return a + b; });
}

__global__ void __launch_bounds__(kLoopedThreads, 2)
    norm_forward_looped_sm90(const __grid_constant__ NormForward p, int64_t columns, int groups) {
  __shared__ float shared[kLoopedThreads / 32];
  for (int64_t i = blockIdx.x; i < p.rows * groups; i += gridDim.x) {
    const Row at{i / groups, static_cast<int>(i % groups)}, of_group{0, at.group};
    const auto value = [&](int64_t c) {
      const float x = load_element(p.x, at, c);
      return p.residual.data ? x + load_element(p.residual, at, c) : x;
    };
    float mean = 0.0f;
    if (p.layer) mean = sum_row(columns, shared, value) / static_cast<float>(columns);
    const float squares = sum_row(columns, shared, [&](int64_t c) {
      const float away = value(c) - mean;
      return away * away;
    });
    const float rstd = rsqrtf(squares / static_cast<float>(columns) + p.eps);
    if (threadIdx.x == 0) {
      if (p.mean) p.mean[i] = mean;
      if (p.rstd) p.rstd[i] = rstd;
    }
    const auto result = [&](int64_t c) {
      float y = (value(c) - mean) * rstd;
      if (p.weight.data) y *= load_element(p.weight, of_group, c) + p.weight_offset;
      return p.bias.data ? y + load_element(p.bias, of_group, c) : y;
    };
    float scale = p.scale ? *p.scale : 1.0f;
    if (p.row_scales) {
      float largest = 0.0f;
      for (int64_t c = threadIdx.x; c < columns; c += kLoopedThreads) {
        largest = max_or_nan(largest, fabsf(result(c)));
      }
      scale = scale_of_row(merge_cta(largest, shared, max_or_nan));
      if (threadIdx.x == 0) p.row_scales[i] = scale;
    }
    const float per_scale = 1.0f / scale;
    for (int64_t c = threadIdx.x; c < columns; c += kLoopedThreads) {
      if (p.residual_out.data) store_element(p.residual_out, at, c, value(c));
      if (p.quantizes()) {
        reinterpret_cast<E4m3*>(row_of(p.y, at))[c] = to_e4m3(result(c) * per_scale);
      } else {
        store_element(p.y, at, c, result(c));
      }
    }
  }
}

__global__ void __launch_bounds__(kLoopedThreads, 2)
    norm_backward_looped_sm90(const __grid_constant__ NormBackward p, int64_t columns, int groups) {
  __shared__ float shared[kLoopedThreads / 32];
  for (int64_t i = blockIdx.x; i < p.rows * groups; i += gridDim.x) {
    const Row at{i / groups, static_cast<int>(i % groups)}, of_group{0, at.group};
    const float rstd = p.rstd[i], mean = p.mean ? p.mean[i] : 0.0f;
    const auto xhat = [&](int64_t c) { return (load_element(p.x, at, c) - mean) * rstd; };
    const auto grad = [&](int64_t c) {
      const float g = load_element(p.grad_y, at, c);
      return p.weight.data ? g * (load_element(p.weight, of_group, c) + p.weight_offset) : g;
    };
    const float count = static_cast<float>(columns);
    const float along =
        sum_row(columns, shared, [&](int64_t c) { return grad(c) * xhat(c); }) / count;
    const float sum = p.mean ? sum_row(columns, shared, grad) / count : 0.0f;
    for (int64_t c = threadIdx.x; c < columns; c += kLoopedThreads) {
      float g = (grad(c) - xhat(c) * along - sum) * rstd;
      if (p.grad_residual_out.data) g += load_element(p.grad_residual_out, at, c);
      if (p.grad_x.data) store_element(p.grad_x, at, c, g);
      if (p.grad_residual.data) store_element(p.grad_residual, at, c, g);
    }
  }
}

// Block y takes the y-th of gridDim.y equal runs of rows.
__global__ void __launch_bounds__(256, 2)
    norm_partials_looped_sm90(const __grid_constant__ NormBackward p, int64_t columns, int groups) {
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x, all = columns * groups;
  if (i >= all) return;
  const int group = static_cast<int>(i / columns);
  const int64_t column = i % columns;
  const int64_t run = (p.rows + gridDim.y - 1) / gridDim.y;
  const int64_t first = blockIdx.y * run, end = min(first + run, p.rows);
  float weight_sum = 0.0f, bias_sum = 0.0f;
  for (int64_t row = first; row < end; ++row) {
    const float grad = load_element(p.grad_y, {row, group}, column);
    const float mean = p.mean ? p.mean[row * groups + group] : 0.0f;
    const float rstd = p.rstd[row * groups + group];
    weight_sum += grad * ((load_element(p.x, {row, group}, column) - mean) * rstd);
    bias_sum += grad;
  }
  const int64_t at = blockIdx.y * all + i;
  if (p.weight_partials) p.weight_partials[at] = weight_sum;
  if (p.bias_partials) p.bias_partials[at] = bias_sum;
}

}  // namespace ikbo::norm
