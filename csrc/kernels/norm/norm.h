// Host entry of the norm kernels. No tensors: raw pointers, checked by the op layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "config/norm.h"
#include "config/norm_backward.h"
#include "launch/tensor_map.h"  // ElementType

namespace ikbo {

inline int bytes_of(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// Rows of each group, their elements side by side. Where it is absent, data is null.
struct NormMatrix {
  void* data;
  int64_t row_bytes;    // from row to row of a group; 0 for one row in place of all
  int64_t group_bytes;  // from group to group
  ElementType type;
};

// To 16 bytes, and so are all rows; and they lie less than 4 GB from one another, which kernels of
// whole rows keep in 32 bits.
inline bool is_aligned(const NormMatrix& m, int64_t rows, int groups) {
  constexpr int64_t kMostRowBytes = int64_t{1} << 32;
  return m.data == nullptr ||
         (reinterpret_cast<uintptr_t>(m.data) % 16 == 0 &&
          (rows <= 1 || (m.row_bytes % 16 == 0 && m.row_bytes < kMostRowBytes)) &&
          (groups <= 1 || m.group_bytes % 16 == 0));
}

// Of the types x has one, and every other operand x's or float32; beside an x in float32, any.
struct NormForward {
  NormMatrix x, residual;   // normalised is x + residual
  NormMatrix weight, bias;  // one row each, aligned to 16 bytes
  NormMatrix y, residual_out;
  float *mean, *rstd;  // [rows, groups] each; may be null
  const float* scale;  // of y where it is in e4m3: one for all,
  float* row_scales;   // or of each row, [rows, groups], found here
  uint32_t* counter;   // a word, where the config has one
  int64_t rows;        // of a group
  float eps, weight_offset;
  bool layer;

  __host__ __device__ bool quantizes() const { return scale || row_scales; }
  // A weight and, beside means and only there, a bias, of x's type, and nothing else.
  bool is_usual(int groups) const {
    const bool usual_bias = layer ? bias.data && bias.type == x.type : !bias.data;
    return groups == 1 && weight_offset == 0.0f && !residual.data && weight.data &&
           weight.type == x.type && usual_bias;
  }
};

struct NormBackward {
  NormMatrix x, grad_y, grad_residual_out;
  NormMatrix weight;
  NormMatrix grad_x, grad_residual;  // the same gradient in two types
  NormMatrix grad_weight, grad_bias;
  const float *mean, *rstd;                // [rows, groups]; mean: LayerNorm only
  float *weight_partials, *bias_partials;  // [config.partials(), groups, columns], where wanted
  uint32_t* turns;                         // a word, where the config has a lead
  int64_t rows;
  float weight_offset;
  bool apart;  // for the kernel: sums over rows are another's, which may begin beside it
};

// 1 <= rows < 2^31. The config was made for the problem.
void run_norm_forward(const NormForward& p, const NormConfig& config, cudaStream_t stream);
// 0 <= rows < 2^31: without rows the sums over rows are zero.
void run_norm_backward(const NormBackward& p, const NormBackwardConfig& config,
                       cudaStream_t stream);
void load_norm();

}  // namespace ikbo
