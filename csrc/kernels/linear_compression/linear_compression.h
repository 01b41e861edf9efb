// Host entry of the linear compression kernels. No tensors: raw pointers, checked by the op layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "config/activation.h"
#include "config/linear_compression.h"
#include "launch/tensor_map.h"

namespace ikbo {

// out[b] = act(w @ e[b] + part[cand_to_user[b]] + bias[:, None]), or without a map, which is the
// users' product, out[b] = w @ e[b]. Bases are 16-byte aligned, strides in elements and multiples
// of 8; part, out and preact are contiguous.
struct LinearCompressionOperands {
  ElementType type;  // of all tensors; kBfloat16 or kFloat16
  const void* w;     // [M, K]
  int64_t w_stride;
  const void* e;                          // [rows, K, N]
  int64_t e_stride, e_row_stride;         // of K and of the rows
  void* out;                              // [rows, M, N]
  const int32_t* cand_to_user = nullptr;  // [rows]
  const void* part = nullptr;             // [n_users, M, N]
  int64_t n_users = 0;
  // The kernel ahead on the stream makes the part: this one starts while that one ends.
  bool part_is_under_way = false;
  const void* bias = nullptr;  // [M]
  Activation activation = Activation::kNone;
  void* preact = nullptr;  // [rows, M, N], where it is saved
};

void run_linear_compression(const LinearCompressionOperands& operands,
                            const LinearCompressionProblem& problem,
                            const LinearCompressionConfig& config, cudaStream_t stream);
void load_linear_compression();

}  // namespace ikbo
