// Host entry of concat_linear's kernels. No tensors: raw pointers, checked by the op layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "config/activation.h"
#include "config/concat_linear.h"

namespace ikbo {

// Row-major 16-bit matrices: unit column stride, 16-byte aligned bases, row strides (in elements)
// that are multiples of 8.
struct ConcatLinearParams {
  struct Matrix {
    const void* data;
    int64_t row_stride;
  };
  bool is_bfloat16;
  Matrix x_cand, w_cand;
  Matrix x_user, w_user;        // only where the config has a product of the users
  void* product;                // [U, N] for it, contiguous
  Matrix part;                  // [U, N]: `product`, or given; unused where U is 0
  bool part_is_float;           // then row strides are even and the base 8-byte aligned
  const void* bias;             // [N], 4-byte aligned, or null
  const int32_t* cand_to_user;  // [B]
  void* out;
  int64_t out_stride;
  void* preact;  // [B, N] contiguous, or null
  Activation activation;
};

void run_concat_linear(const ConcatLinearParams& params, const ConcatLinearProblem& problem,
                       const ConcatLinearConfig& config, cudaStream_t stream);
void load_concat_linear();

}  // namespace ikbo
