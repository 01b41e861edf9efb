// D[M, N] = X[M, K] W[N, K]^T for few rows of X (config/concat_linear.h): what one or a few users
// have to multiply before the candidates can join.
//
// A CTA computes 16 columns (rows of W) of 32 rows. Its warps share K: each takes blocks of 64,
// reads them straight into the fragments of mma.sync, 16 bytes a lane, and keeps sums of its own,
// which meet in shared memory at the end. All reads of a warp are under way at once.
#pragma once

#include "config/concat_linear.h"
#include "hopper/dependent_launch.cuh"
#include "hopper/mma.cuh"

namespace ikbo::concat_linear {

template <class T>
struct FewRowsParams {
  const T* x;  // rows of 8-element multiples, 16-byte aligned; likewise w
  const T* w;
  T* d;
  int64_t x_stride, w_stride, d_stride;
  int32_t M, N, K;
  int32_t column_blocks;  // ceil(N / 16)
};

template <class T>
__global__ void __launch_bounds__(FewRowsKernel::kThreads, 1)
    few_rows_sm90(const FewRowsParams<T> p) {
  constexpr int kBlocks = FewRowsKernel::kRows / 8;
  constexpr int kStep = 64 * FewRowsKernel::kWarps;  // of K, all warps together
  constexpr int kSteps = 2;                          // whose part of W is read at once
  __shared__ float shared[FewRowsKernel::kWarps][FewRowsKernel::kRows][FewRowsKernel::kColumns];
  hopper::allow_next_kernel();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = static_cast<int>(blockIdx.x % p.column_blocks) * FewRowsKernel::kColumns;
  const int row = static_cast<int>(blockIdx.x / p.column_blocks) * FewRowsKernel::kRows;
  // Past the end the last row stands in: what comes of it isn't stored.
  const T *w[2], *x[kBlocks];
  for (int i = 0; i < 2; ++i) {
    w[i] = p.w + min(column + 8 * i + lane / 4, p.N - 1) * p.w_stride;
  }
  for (int i = 0; i < kBlocks; ++i) {
    x[i] = p.x + min(row + 8 * i + lane / 4, p.M - 1) * p.x_stride;
  }
  const int blocks = (p.M - row + 7) / 8;  // of rows, that there are
  const int full_K = p.K / 8 * 8;          // in whole chunks of 16 bytes
  const auto load = [](const T* matrix_row, int k, bool is_there) {
    return is_there ? *reinterpret_cast<const uint4*>(matrix_row + k) : uint4{};
  };

  float sums[kBlocks][4] = {};
  for (int first = 64 * warp; first < full_K; first += kSteps * kStep) {
    // A lane's 8 elements follow each other along K, unlike the product's, but do so on both sides.
    uint4 of_w[kSteps][2][2];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = first + step * kStep + 32 * half + lane % 4 * 8;
        for (int i = 0; i < 2; ++i) of_w[step][half][i] = load(w[i], k, k < full_K);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint4 of_x[2][kBlocks];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = first + step * kStep + 32 * half + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) of_x[half][i] = load(x[i], k, k < full_K && i < blocks);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 &upper = of_w[step][half][0], &lower = of_w[step][half][1];
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          const uint4& right = of_x[half][i];
          hopper::multiply_16x8<T>(sums[i], {upper.x, lower.x, upper.y, lower.y},
                                   {right.x, right.y});
          hopper::multiply_16x8<T>(sums[i], {upper.z, lower.z, upper.w, lower.w},
                                   {right.z, right.w});
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      shared[warp][8 * i + lane % 4 * 2 + j % 2][lane / 4 + j / 2 * 8] = sums[i][j];
    }
  }
  __syncthreads();
  static_assert(FewRowsKernel::kThreads == FewRowsKernel::kRows * FewRowsKernel::kColumns);
  const int my_row = threadIdx.x / FewRowsKernel::kColumns;
  const int my_column = threadIdx.x % FewRowsKernel::kColumns;
  if (row + my_row >= p.M || column + my_column >= p.N) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < FewRowsKernel::kWarps; ++i) sum += shared[i][my_row][my_column];
#pragma unroll 1
  for (int k = full_K; k < p.K; ++k) {
    sum += static_cast<float>(p.x[(row + my_row) * p.x_stride + k]) *
           static_cast<float>(p.w[(column + my_column) * p.w_stride + k]);
  }
  p.d[(row + my_row) * p.d_stride + column + my_column] = static_cast<T>(sum);
}

}  // namespace ikbo::concat_linear
