#include "ops/tensor.h"

namespace ikbo {

Tensor bmm_accumulate(const Tensor& a, const Tensor& b) {
  const ScalarType sums = accumulate_type(a.scalar_type());
  const Sizes shape{a.size(0), a.size(1), b.size(2)};
  if (shape[0] == 0 || shape[1] == 0 || shape[2] == 0 || a.size(2) == 0) {
    return zeros(shape, sums, a);
  }
  if (a.is_cuda() && is_16_bit(a.scalar_type()) && a.scalar_type() == b.scalar_type()) {
    return aten("aten::bmm", "dtype", a, b, sums);
  }
  return aten("aten::bmm", "", cast(a, sums), cast(b, sums));
}

}  // namespace ikbo
