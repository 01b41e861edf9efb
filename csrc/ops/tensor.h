// The tensor layer's vocabulary: LibTorch's stable tensor and calls of ATen ops through the stable
// dispatcher. Everything an op needs of torch goes through this header.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace ikbo {

// Beside the wrappers below, argument-dependent lookup finds torch::stable's own: reshape,
// transpose, contiguous, unsqueeze, ...

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;
using Tensors2 = std::tuple<Tensor, Tensor>;
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Tensors7 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The results of a call, taken from where the dispatcher left them.
template <class Result>
struct AtenResults {
  static constexpr size_t kCount = 1;
  static Result take(const StableIValue* stack) {
    return torch::stable::detail::to<Result>(stack[0]);
  }
};
template <class... Results>
struct AtenResults<std::tuple<Results...>> {
  static constexpr size_t kCount = sizeof...(Results);
  static std::tuple<Results...> take(const StableIValue* stack) {
    return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return std::tuple<Results...>{torch::stable::detail::to<Results>(stack[kIndex])...};
    }(std::index_sequence_for<Results...>{});
  }
};

// Calls aten::NAME[.OVERLOAD] with every argument of its schema, in order. Where the schema has
// several results, Result is the tuple of all of them: one that isn't taken is never freed. The
// stable dispatcher takes no Scalar arguments, so overloads that have one (add.Tensor, clamp,
// gt.Scalar, ...) can't be called: use add() below, or the Tensor overload with scalar().
template <class Result = Tensor, class... Args>
Result aten(const char* name, const char* overload, const Args&... args) {
  constexpr size_t kSlots = std::max<size_t>(sizeof...(Args), AtenResults<Result>::kCount);
  std::array<StableIValue, kSlots> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return AtenResults<Result>::take(stack.data());
}

inline Sizes sizes_of(const Tensor& t) { return Sizes(t.sizes().begin(), t.sizes().end()); }

// Contiguous, uninitialised. By the C shim: a quarter of the time of a call through the dispatcher.
Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType dtype, const Tensor& like);
inline Tensor full(const Sizes& sizes, double value, ScalarType dtype, const Tensor& like) {
  return torch::stable::full(sizes, value, dtype, std::nullopt, like.device());
}
inline Tensor zeros(const Sizes& sizes, ScalarType dtype, const Tensor& like) {
  return full(sizes, 0.0, dtype, like);
}
// What an op returns in place of a result that was not asked for.
inline Tensor nothing(ScalarType dtype, const Tensor& like) { return empty({0}, dtype, like); }
inline Tensor scalar(double value, ScalarType dtype, const Tensor& like) {
  return full({}, value, dtype, like);
}

inline Tensor cast(const Tensor& t, ScalarType dtype) {
  return t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
}
// Sums of floating-point tensors only: the shim's alpha is a double, which ATen refuses for
// integers.
inline Tensor add(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b, -1.0); }
inline Tensor sub(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b); }
inline Tensor mul(const Tensor& a, const Tensor& b) { return aten("aten::mul", "Tensor", a, b); }
inline Tensor mul(const Tensor& a, double b) { return mul(a, scalar(b, a.scalar_type(), a)); }
inline Tensor where(const Tensor& condition, const Tensor& yes, const Tensor& no) {
  return aten("aten::where", "self", condition, yes, no);
}
inline Tensor sum_over(const Tensor& t, const Sizes& dims, bool keepdim = false) {
  return aten("aten::sum", "dim_IntList", t, std::optional<Sizes>(dims), keepdim,
              std::optional<ScalarType>());
}
inline Tensor expand(const Tensor& t, const Sizes& sizes) {
  return aten("aten::expand", "", t, sizes, false);
}
inline Tensor narrow(const Tensor& t, int64_t dim, int64_t start, int64_t length) {
  Tensor whole = t;  // the stable wrapper takes a mutable reference
  return torch::stable::narrow(whole, dim, start, length);
}
inline Tensor index_select(const Tensor& t, int64_t dim, const Tensor& index) {
  return aten("aten::index_select", "", t, dim, index);
}
inline void copy_(const Tensor& to, const Tensor& from) {
  Tensor target = to;
  torch::stable::copy_(target, from);
}

inline bool is_16_bit(ScalarType t) { return t == ScalarType::Half || t == ScalarType::BFloat16; }
// The type sums are kept in: fp32, or fp64 where the inputs are fp64.
inline ScalarType accumulate_type(ScalarType t) {
  return t == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// 0, 1, ..., n - 1 in int32 or int64 (aten::arange takes Scalars).
Tensor arange(int64_t n, const Tensor& like, ScalarType dtype = ScalarType::Int);

// a[G,m,k] @ b[G,k,n] with sums and result in the accumulation type. CUDA multiplies 16-bit
// operands as they are; the CPU's 16-bit product would round its result, so there the operands are
// widened.
Tensor bmm_accumulate(const Tensor& a, const Tensor& b);
inline Tensor mm_accumulate(const Tensor& a, const Tensor& b) {
  return torch::stable::squeeze(
      bmm_accumulate(torch::stable::unsqueeze(a, 0), torch::stable::unsqueeze(b, 0)), 0);
}

// An operand of a product with tensors of `dtype`: CUDA multiplies 16-bit by 16-bit, as autograd of
// plain torch does; elsewhere the accumulation type is kept.
inline Tensor as_operand(const Tensor& t, ScalarType dtype) {
  return t.is_cuda() && is_16_bit(dtype) ? cast(t, dtype) : t;
}

// References work on slices of the batch, so that what they need besides inputs and outputs is
// bounded: no slice's temporaries exceed about this many bytes (a single row may). More on a GPU,
// where each slice costs launches.
inline int64_t workspace_bytes(const Tensor& like) {
  return like.is_cuda() ? int64_t{1} << 30 : int64_t{64} << 20;
}

// Calls body(first, count) over [0, rows) in slices of at most workspace_bytes / row_bytes rows,
// all about as large: a product of a last few rows takes longer than its share.
template <class Body>
void for_each_slice(const Tensor& like, int64_t rows, int64_t row_bytes, const Body& body) {
  const int64_t most =
      std::max<int64_t>(1, workspace_bytes(like) / std::max<int64_t>(1, row_bytes));
  const int64_t slices = std::max<int64_t>(1, (rows + most - 1) / most);
  const int64_t step = (rows + slices - 1) / slices;
  for (int64_t first = 0; first < rows; first += step) body(first, std::min(step, rows - first));
}

}  // namespace ikbo
