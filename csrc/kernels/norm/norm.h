// Host entry of the norm kernels. No tensors: raw pointers, checked by the op layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "config/norm.h"
#include "launch/tensor_map.h"  // ElementType

namespace ikbo {

inline int bytes_of(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// A matrix, its elements side by side. Where it is absent, data is null.
struct NormMatrix {
  void* data;
  int64_t row_bytes;  // from row to row; 0 for one row in place of all
  ElementType type;
};

struct NormForward {
  NormMatrix x, residual;      // normalised is x + residual
  NormMatrix weight, bias;     // one row each
  NormMatrix y, residual_out;  // contiguous
  float *mean, *rstd;          // [rows] each; may be null
  uint32_t* ticket;            // zero, where the config goes by ticket
  int64_t rows;
  float eps, weight_offset;
  bool layer;
};

struct NormBackward {
  NormMatrix x, grad_y, grad_residual_out;
  NormMatrix weight;
  NormMatrix grad_x, grad_residual;  // the same gradient in two types; contiguous
  NormMatrix grad_weight, grad_bias;
  const float *mean, *rstd;                // mean: LayerNorm only
  float *weight_partials, *bias_partials;  // [config.partials, columns] each, where wanted
  int64_t rows;
  float weight_offset;
};

// 1 <= rows < 2^31. The types of all operands are the op's own; x's is one the config was made for.
void run_norm_forward(const NormForward& p, const NormConfig& config, cudaStream_t stream);
// 0 <= rows < 2^31: without rows the sums over rows are zero.
void run_norm_backward(const NormBackward& p, const NormConfig& config, cudaStream_t stream);
void load_norm();

}  // namespace ikbo
