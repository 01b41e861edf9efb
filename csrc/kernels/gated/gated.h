// Host entries of linear_act's, gated_linear's and gated_mlp's kernels. No tensors: raw pointers,
// checked by the op layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "config/activation.h"
#include "config/gated.h"

namespace ikbo {

// Row-major 16-bit matrices: unit column stride, 16-byte aligned bases, row strides (in elements)
// that are multiples of 8. Biases are contiguous and 16-byte aligned; or null.
struct LinearWeight {
  const void* data;  // [N, K]
  int64_t row_stride;
  const void* bias;  // [N]
};

struct LinearActParams {
  bool is_bfloat16;
  const void* x;  // [M, K]
  int64_t x_stride;
  LinearWeight w;
  void* out;  // [M, N]
  int64_t out_stride;
  void* preact;  // [M, N] contiguous, or null
  Activation activation;
  bool x_is_under_way;  // the kernel ahead on the stream computes x: this one starts while it ends
};

struct GatedLinearParams {
  bool is_bfloat16;
  const void* x;  // [M, K]
  int64_t x_stride;
  LinearWeight gate, up;
  void* out;  // [M, N]
  int64_t out_stride;
  void* gate_preact;  // [M, N] contiguous, or both null
  void* up_preact;
  Activation activation;
  bool starts_next;  // the next kernel on the stream may start before this one ends
};

void run_linear_act(const LinearActParams& params, const LinearProblem& problem,
                    const ProductConfig& config, cudaStream_t stream);
void run_gated_linear(const GatedLinearParams& params, const LinearProblem& problem,
                      const ProductConfig& config, cudaStream_t stream);
void load_gated();  // linear_act's GEMM kernels are concat_linear's

}  // namespace ikbo
