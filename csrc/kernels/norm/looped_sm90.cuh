// Rows longer than a cluster holds: a CTA a row, read from memory once for every sum and result.
#pragma once

#include "kernels/norm/row.cuh"

namespace ikbo::norm {

inline constexpr int kLoopedThreads = 512;

__device__ inline float load_element(const NormMatrix& m, int64_t row, int64_t column) {
  const char* at = static_cast<const char*>(m.data) + row * m.row_bytes;
  float value = 0.0f;
  with_type(m.type, [&](auto zero) {
    value = static_cast<float>(reinterpret_cast<const decltype(zero)*>(at)[column]);
  });
  return value;
}
__device__ inline void store_element(const NormMatrix& m, int64_t row, int64_t columns,
                                     int64_t column, float value) {
  with_type(m.type, [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(m.data)[row * columns + column] = static_cast<T>(value);
  });
}

// The sum over the threads of the CTA, for all of them.
__device__ inline float sum_cta(float value, float (&shared)[kLoopedThreads / 32]) {
#pragma unroll
  for (int offset = 16; offset >= 1; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int w = 0; w < kLoopedThreads / 32; ++w) sum += shared[w];
  __syncthreads();
  return sum;
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
  return sum_cta(sum, shared);
}

__global__ void __launch_bounds__(kLoopedThreads)
    norm_forward_looped_sm90(const __grid_constant__ NormForward p, int64_t columns) {
  __shared__ float shared[kLoopedThreads / 32];
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const auto value = [&](int64_t c) {
      const float x = load_element(p.x, row, c);
      return p.residual.data ? x + load_element(p.residual, row, c) : x;
    };
    float mean = 0.0f;
    if (p.layer) mean = sum_row(columns, shared, value) / static_cast<float>(columns);
    const float squares = sum_row(columns, shared, [&](int64_t c) {
      const float away = value(c) - mean;
      return away * away;
    });
    const float rstd = rsqrtf(squares / static_cast<float>(columns) + p.eps);
    if (threadIdx.x == 0) {
      if (p.mean) p.mean[row] = mean;
      if (p.rstd) p.rstd[row] = rstd;
    }
    for (int64_t c = threadIdx.x; c < columns; c += kLoopedThreads) {
      const float x = value(c);
      if (p.residual_out.data) store_element(p.residual_out, row, columns, c, x);
      float y = (x - mean) * rstd;
      if (p.weight.data) y *= load_element(p.weight, 0, c) + p.weight_offset;
      if (p.bias.data) y += load_element(p.bias, 0, c);
      store_element(p.y, row, columns, c, y);
    }
  }
}

__global__ void __launch_bounds__(kLoopedThreads)
    norm_backward_looped_sm90(const __grid_constant__ NormBackward p, int64_t columns) {
  __shared__ float shared[kLoopedThreads / 32];
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const float rstd = p.rstd[row], mean = p.mean ? p.mean[row] : 0.0f;
    const auto xhat = [&](int64_t c) { return (load_element(p.x, row, c) - mean) * rstd; };
    const auto grad = [&](int64_t c) {
      const float g = load_element(p.grad_y, row, c);
      return p.weight.data ? g * (load_element(p.weight, 0, c) + p.weight_offset) : g;
    };
    const float count = static_cast<float>(columns);
    const float along =
        sum_row(columns, shared, [&](int64_t c) { return grad(c) * xhat(c); }) / count;
    const float sum = p.mean ? sum_row(columns, shared, grad) / count : 0.0f;
    for (int64_t c = threadIdx.x; c < columns; c += kLoopedThreads) {
      float g = (grad(c) - xhat(c) * along - sum) * rstd;
      if (p.grad_residual_out.data) g += load_element(p.grad_residual_out, row, c);
      if (p.grad_x.data) store_element(p.grad_x, row, columns, c, g);
      if (p.grad_residual.data) store_element(p.grad_residual, row, columns, c, g);
    }
  }
}

// Block y takes the y-th of gridDim.y equal runs of rows.
__global__ void __launch_bounds__(256)
    norm_partials_looped_sm90(const __grid_constant__ NormBackward p, int64_t columns) {
  const int64_t column = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (column >= columns) return;
  const int64_t run = (p.rows + gridDim.y - 1) / gridDim.y;
  const int64_t first = blockIdx.y * run, end = min(first + run, p.rows);
  float weight_sum = 0.0f, bias_sum = 0.0f;
  for (int64_t row = first; row < end; ++row) {
    const float grad = load_element(p.grad_y, row, column);
    const float mean = p.mean ? p.mean[row] : 0.0f;
    weight_sum += grad * ((load_element(p.x, row, column) - mean) * p.rstd[row]);
    bias_sum += grad;
  }
  const int64_t at = blockIdx.y * columns + column;
  if (p.weight_partials) p.weight_partials[at] = weight_sum;
  if (p.bias_partials) p.bias_partials[at] = bias_sum;
}

}  // namespace ikbo::norm
