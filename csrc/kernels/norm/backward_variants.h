// For measuring alone.
#pragma once
#include "kernels/norm/backward_wide_sm90.cuh"
namespace ikbo::norm {
struct BackwardVariant {
  const char* name;
  ElementType type;
  int lanes, vectors, rows, warps, columns;  // columns of a CTA
  bool packed;
  DirectBackwardKernel direct[2];  // without and with sums
  int direct_bytes[2];
  void (*wide[2])(WideBackward);
  int wide_bytes, teams;
};
const BackwardVariant* backward_variant(const char* name);
template <class T>
void columns_kernel(NormBackward p, int64_t columns);
}  // namespace ikbo::norm
