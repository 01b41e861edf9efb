// What the kernels of gated_linear, gated_mlp and linear_act take: features as rows, and Linears.
#pragma once

#include <array>

#include "kernels/gated/gated.h"
#include "ops/gated_reference.h"
#include "ops/operands.h"

namespace ikbo {

// Why the kernels don't take features and result, both as rows, or nullptr. `of_problem` says it of
// the problem's sizes, given the DeviceLimits. Rows of few features may begin anywhere.
template <class OfProblem>
const char* rows_decline_reason(const Tensor& x, const Tensor& out, const OfProblem& of_problem) {
  if (!is_hopper_16_bit(x)) return "not a Hopper GPU, or not float16 or bfloat16";
  if (const char* reason = of_problem(device_limits(x.get_device_index()))) return reason;
  if (!has_aligned_rows(x)) {
    return "features whose elements don't lie side by side in rows at multiples of 16 bytes";
  }
  const bool is_narrow = out.size(1) < kMaxNarrowFeatures;
  if (is_narrow ? !has_rows_apart(out) : !has_aligned_rows(out)) {
    return "an out whose elements don't lie side by side in rows at multiples of 16 bytes";
  }
  return nullptr;
}

// The Linears of a call as kernels read them.
class LinearOperands {
 public:
  // At most kMaxPackedMatrices times.
  LinearWeight read(const Linear& linear);
  // After the last read(), before a kernel reads them.
  void pack(cudaStream_t stream) const { weights_.pack(stream); }
  int packed() const { return weights_.packed(); }

 private:
  WeightOperands weights_;
  std::array<OptTensor, kMaxPackedMatrices> biases_;
  int read_ = 0;
};

// gated_linear's part of a call.
GatedLinearParams gated_linear_params(const Tensor& x, const LinearWeight& gate,
                                      const LinearWeight& up, Activation activation,
                                      const Tensor& out, const std::optional<GatedSides>& saved);

}  // namespace ikbo
