// The gradients of weight and bias: sums over rows of what CTAs leave, or of few rows themselves.
#pragma once

#include "hopper/dependent_launch.cuh"
#include "kernels/norm/norm.h"
#include "kernels/norm/row.cuh"

namespace ikbo::norm {

inline constexpr int kFinishColumns = 32, kFinishGroups = 16;
// Loads of a thread at once, by the number of partials: those of an H200's 132 CTAs, or of four
// times as many, in one trip to memory. (Many where few are needed cost a tenth of a small
// backward.)
inline constexpr int kFewLoads = 9, kManyLoads = 36;

// Adds up the partials of a column, of all groups' columns side by side, in the same order each
// time: sixteen warps take every sixteenth row each, and their sums are added one by one.
template <int kLoads>
__global__ void __launch_bounds__(kFinishColumns* kFinishGroups)
    norm_finish_sm90(const __grid_constant__ NormBackward p, int64_t columns, int partials) {
  __shared__ float sums[kFinishGroups][kFinishColumns];
  // The next kernel's CTAs may set up meanwhile: all of this one's are there, or it couldn't begin.
  hopper::allow_next_kernel();
  hopper::touch(p);
  hopper::wait_for_previous_kernel();
  const bool bias = blockIdx.y == 1;
  const float* from = bias ? p.bias_partials : p.weight_partials;
  if (from == nullptr) return;
  const int group = threadIdx.x / kFinishColumns, lane = threadIdx.x % kFinishColumns;
  const int64_t column = int64_t{blockIdx.x} * kFinishColumns + lane;
  float sum = 0.0f;
  if (column < columns) {
    for (int first = group; first < partials; first += kFinishGroups * kLoads) {
      float parts[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int64_t i = first + j * kFinishGroups;
        parts[j] = i < partials ? from[i * columns + column] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kLoads; ++j) sum += parts[j];
    }
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group != 0 || column >= columns) return;
  for (int g = 1; g < kFinishGroups; ++g) sum += sums[g][lane];
  const NormMatrix& to = bias ? p.grad_bias : p.grad_weight;
  with_type<float>(to.type, [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(to.data)[column] = static_cast<T>(sum);
  });
}

// The same of at most 32 partials, those of clusters, of very many columns, a multiple of four:
// four columns a thread. (A warp a column's partials would take 8192 CTAs, half of whose warps have
// nothing to do, and 25 us.)
inline constexpr int kQuadGroups = 4, kQuadLanes = 64, kQuadPartials = 32;
inline constexpr int64_t kQuadColumns = 8192;
__global__ void __launch_bounds__(kQuadGroups* kQuadLanes)
    norm_finish_quads_sm90(const __grid_constant__ NormBackward p, int64_t columns, int partials) {
  constexpr int kLoads = kQuadPartials / kQuadGroups;
  __shared__ float4 sums[kQuadGroups][kQuadLanes];
  hopper::allow_next_kernel();
  hopper::touch(p);
  hopper::wait_for_previous_kernel();
  const bool bias = blockIdx.y == 1;
  const float* const from = bias ? p.bias_partials : p.weight_partials;
  if (from == nullptr) return;
  const int group = threadIdx.x / kQuadLanes, lane = threadIdx.x % kQuadLanes;
  const int64_t quad = int64_t{blockIdx.x} * kQuadLanes + lane, quads = columns / 4;
  float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
  const auto add = [&](const float4& more) {
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  };
  if (quad < quads) {
    float4 parts[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int64_t i = group + j * kQuadGroups;
      parts[j] = i < partials ? reinterpret_cast<const float4*>(from)[i * quads + quad]
                              : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) add(parts[j]);
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group != 0 || quad >= quads) return;
#pragma unroll
  for (int g = 1; g < kQuadGroups; ++g) add(sums[g][lane]);
  const NormMatrix& to = bias ? p.grad_bias : p.grad_weight;
  with_type<float>(to.type, [&](auto zero) {
    using T = decltype(zero);
    T* const first = static_cast<T*>(to.data) + 4 * quad;
    first[0] = static_cast<T>(sum.x), first[1] = static_cast<T>(sum.y);
    first[2] = static_cast<T>(sum.z), first[3] = static_cast<T>(sum.w);
  });
}

// Of few whole, aligned rows of one type, from x and grad_y themselves. It runs beside the kernel
// ahead of it, which computes grad_x, and which lets it begin once it has waited for what is ahead
// of both.
inline constexpr int kColumnsThreads = 512, kColumnsLanes = 16;
template <class T>
__global__ void __launch_bounds__(kColumnsThreads)
    norm_columns_sm90(const __grid_constant__ NormBackward p, int64_t columns) {
  constexpr int kVector = 16 / sizeof(T), kSpan = kColumnsLanes * kVector;
  constexpr int kGroups = kColumnsThreads / kColumnsLanes, kAtOnce = 4;  // rows
  __shared__ float sums[2][kGroups][kSpan];
  hopper::allow_next_kernel();
  const int lane = threadIdx.x % kColumnsLanes, group = threadIdx.x / kColumnsLanes;
  const int64_t column = int64_t{blockIdx.x} * kSpan + lane * kVector;
  float weight_sums[kVector] = {}, bias_sums[kVector] = {};
  const int rows = static_cast<int>(p.rows);
  if (column < columns) {
    const char* const x = static_cast<const char*>(p.x.data) + column * sizeof(T);
    const char* const grad_y = static_cast<const char*>(p.grad_y.data) + column * sizeof(T);
    for (int first = group; first < rows; first += kGroups * kAtOnce) {
      Words<4> x_words[kAtOnce], grad_words[kAtOnce];
      float rstd[kAtOnce], mean[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int row = first + j * kGroups;
        x_words[j] = grad_words[j] = Words<4>{};
        rstd[j] = mean[j] = 0.0f;
        if (row >= rows) continue;
        x_words[j] = load_words<4>(x + row * p.x.row_bytes);
        grad_words[j] = load_words<4>(grad_y + row * p.grad_y.row_bytes);
        rstd[j] = p.rstd[row];
        if (p.mean) mean[j] = p.mean[row];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        float x_values[kVector], grad[kVector];
        unpack_words<T>(x_words[j], x_values);
        unpack_words<T>(grad_words[j], grad);
        const float shift = -mean[j] * rstd[j];
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          bias_sums[e] += grad[e];
          weight_sums[e] = fmaf(grad[e], fmaf(x_values[e], rstd[j], shift), weight_sums[e]);
        }
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    sums[0][group][lane * kVector + e] = weight_sums[e];
    sums[1][group][lane * kVector + e] = bias_sums[e];
  }
  __syncthreads();
  const int mine = threadIdx.x % kSpan;
  const int64_t at = int64_t{blockIdx.x} * kSpan + mine;
  const bool bias = threadIdx.x >= kSpan;
  const NormMatrix& to = bias ? p.grad_bias : p.grad_weight;
  if (threadIdx.x < 2 * kSpan && at < columns && to.data != nullptr) {
    float sum = sums[bias][0][mine];
#pragma unroll
    for (int g = 1; g < kGroups; ++g) sum += sums[bias][g][mine];
    with_type<float>(to.type, [&](auto zero) {
      using Sum = decltype(zero);
      static_cast<Sum*>(to.data)[at] = static_cast<Sum>(sum);
    });
  }
  // Who waits for this kernel counts on the one ahead as well.
  hopper::wait_for_previous_kernel();
}

}  // namespace ikbo::norm
