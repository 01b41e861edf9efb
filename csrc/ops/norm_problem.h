// What a norm op is asked to do, checked: the geometry and the operands every norm shares.
#pragma once

#include "ops/checks.h"
#include "ops/tensor.h"

namespace ikbo {

enum class NormKind { kRms, kLayer };

// x seen as [rows, groups, columns]; each row's groups are normalised one by one. Only head_norm
// has more groups than one. weight and bias are seen as [groups, columns].
struct NormProblem {
  NormKind kind;
  Sizes sizes;    // of x and y
  Sizes leading;  // of mean and rstd: sizes without the normalised dimensions
  int64_t rows, groups, columns;
  double eps, weight_offset;
  ScalarType sums;  // what is computed in, and the type of mean and rstd
};

// The tensors of a forward. A view of the op's arguments, alive while the op runs.
struct NormInputs {
  const Tensor& x;
  const Tensor* residual;  // add_* only
  const OptTensor& weight;
  const OptTensor& bias;
};

// Checks weight and bias against x, and the residual where there is one. The normalised dimensions
// are as many as weight, or else bias, has; normalized_ndim says how many where there is neither.
NormProblem check_norm(const char* op, NormKind kind, const NormInputs& in, double eps,
                       double weight_offset, int64_t normalized_ndim);

// x[..., H, D] with weight [H, D], normalised over D.
NormProblem check_head_norm(const char* op, const NormInputs& in, double eps, double weight_offset);

// A dtype argument, or `fallback` where it isn't given.
ScalarType result_dtype(const char* op, const char* name, std::optional<ScalarType> dtype,
                        ScalarType fallback);

// residual_out, in residual's dtype unless another is given; mean or rstd.
Tensor allocate_residual_out(const char* op, const NormProblem& p, const Tensor& residual,
                             std::optional<ScalarType> residual_dtype);
Tensor allocate_statistics(const NormProblem& p, const Tensor& x);

}  // namespace ikbo
