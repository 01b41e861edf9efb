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

// Elements k ... k + 7 of a row that is K long, zero past its end. A null row is zero.
__device__ inline uint4 load_8(const void* row, int k, int K) {
  if (row == nullptr || k >= K) return {};
  uint4 words = static_cast<const uint4*>(row)[k / 8];
  const auto mask = [&](uint32_t& word, int first) {
    const int left = K - k - first;
    if (left < 2) word &= left == 1 ? 0xffffu : 0u;
  };
  if (k + 8 > K) mask(words.x, 0), mask(words.y, 2), mask(words.z, 4), mask(words.w, 6);
  return words;
}

template <class T>
__global__ void __launch_bounds__(FewRowsKernel::kThreads, 1)
    few_rows_sm90(const FewRowsParams<T> p) {
  constexpr int kRowBlocks = FewRowsKernel::kRows / 8;
  constexpr int kStep = 64 * FewRowsKernel::kWarps;  // of K, all warps together
  __shared__ float shared[FewRowsKernel::kWarps][FewRowsKernel::kRows][FewRowsKernel::kColumns];
  hopper::allow_next_kernel();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = static_cast<int>(blockIdx.x % p.column_blocks) * FewRowsKernel::kColumns;
  const int row = static_cast<int>(blockIdx.x / p.column_blocks) * FewRowsKernel::kRows;
  const auto row_of = [](const T* base, int index, int count, int64_t stride) {
    return index < count ? base + index * stride : nullptr;
  };
  const T* w[2];
  for (int i = 0; i < 2; ++i) w[i] = row_of(p.w, column + lane / 4 + 8 * i, p.N, p.w_stride);
  const T* x[kRowBlocks];
  for (int i = 0; i < kRowBlocks; ++i) {
    x[i] = row_of(p.x, row + lane / 4 + 8 * i, p.M, p.x_stride);
  }

  float sums[kRowBlocks][4] = {};
  for (int first = 64 * warp; first < p.K; first += 2 * kStep) {
    uint4 of_w[2][2][2], of_x[2][2][kRowBlocks];
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A lane holds 8 elements of K that follow: the order within the 32 is the same on both
        // sides.
        const int k = first + step * kStep + 32 * half + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) of_w[step][half][i] = load_8(w[i], k, p.K);
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) of_x[step][half][i] = load_8(x[i], k, p.K);
      }
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 &upper = of_w[step][half][0], &lower = of_w[step][half][1];
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
          const uint4& right = of_x[step][half][i];
          hopper::multiply_16x8<T>(sums[i], {upper.x, lower.x, upper.y, lower.y},
                                   {right.x, right.y});
          hopper::multiply_16x8<T>(sums[i], {upper.z, lower.z, upper.w, lower.w},
                                   {right.z, right.w});
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      shared[warp][8 * i + lane % 4 * 2 + j % 2][lane / 4 + j / 2 * 8] = sums[i][j];
    }
  }
  __syncthreads();
  static_assert(FewRowsKernel::kThreads == FewRowsKernel::kRows * FewRowsKernel::kColumns);
  const int my_row = threadIdx.x / FewRowsKernel::kColumns;
  const int my_column = threadIdx.x % FewRowsKernel::kColumns;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < FewRowsKernel::kWarps; ++i) sum += shared[i][my_row][my_column];
  if (row + my_row < p.M && column + my_column < p.N) {
    p.d[(row + my_row) * p.d_stride + column + my_column] = static_cast<T>(sum);
  }
}

}  // namespace ikbo::concat_linear
