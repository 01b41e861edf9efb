// Host entries of the kernels of linear_act, gated_linear and gated_mlp, forward and backward. No
// tensors: raw pointers, checked by the op layer.
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
  bool x_is_under_way;  // the kernel ahead on the stream computes x, and nothing else of these
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
};

// Gradients at the two pre-activations of act(gate) * up. [M, N] tensors are contiguous and 16-byte
// aligned.
struct GatedGradParams {
  bool is_bfloat16;
  const void* grad;     // [M, N]: of act(gate) * up; or, by GEMM, [M, out_features]: of its product
  int64_t grad_stride;  // by GEMM; else rows follow each other
  LinearWeight w_down;  // by GEMM: [out_features, N]
  int64_t out_features;
  const void* gate;  // [M, N]
  const void* up;
  void* grad_gate;
  void* grad_up;
  void* hidden;  // act(gate) * up once more; or null
  Activation activation;
};

// grad_x = grad_gate w_gate + grad_up w_up.
struct InputGradParams {
  bool is_bfloat16;
  const void* grad_gate;  // [M, N] contiguous, likewise
  const void* grad_up;
  LinearWeight w_gate, w_up;  // [N, K]
  void* grad_x;               // [M, K]
  int64_t grad_x_stride;
};

// grad * act'(pre-activation), where `saved` is that or, for relu and sigmoid, the output. All
// contiguous and 16-byte aligned.
struct LinearGradParams {
  bool is_bfloat16;
  const void* grad;
  const void* saved;
  void* grad_preact;
  int64_t count;
  Activation activation;
};

void run_linear_act(const LinearActParams& params, const LinearProblem& problem,
                    const ProductConfig& config, cudaStream_t stream);
void run_gated_linear(const GatedLinearParams& params, const LinearProblem& problem,
                      const ProductConfig& config, cudaStream_t stream);
void run_gated_grad(const GatedGradParams& params, const LinearProblem& problem,
                    const GatedGradConfig& config, cudaStream_t stream);
void run_input_grad(const InputGradParams& params, const LinearProblem& problem,
                    const GatedGradConfig& config, cudaStream_t stream);
void run_linear_grad(const LinearGradParams& params, cudaStream_t stream);
void load_gated_grad();
void load_gated();  // these too; linear_act's GEMM kernels are concat_linear's

}  // namespace ikbo
