#include "ops/tensor.h"

namespace ikbo {

Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType dtype, const Tensor& like) {
  std::array<int64_t, 64> strides;  // torch's limit on dimensions
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  int32_t device_type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device_type,
      like.get_device_index(), &handle));
  return Tensor(handle);
}

Tensor arange(int64_t n, const Tensor& like, ScalarType dtype) {
  const Tensor steps = full({n}, 1, dtype, like);
  if (n == 0) return steps;
  Tensor first = narrow(steps, 0, 0, 1);
  torch::stable::zero_(first);
  return aten("aten::cumsum", "", steps, int64_t{0}, std::optional<ScalarType>(dtype));
}

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
