#include "launch/tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <stdexcept>
#include <string>

#include "launch/error.h"

namespace ikbo {
namespace {

using List = std::initializer_list<int64_t>;

constexpr int64_t kAlignment = 16;
constexpr int64_t kMaxSize = int64_t{1} << 32;
constexpr int64_t kMaxStride = int64_t{1} << 40;
constexpr int64_t kMaxBox = 256;
constexpr int64_t kSwizzleBytes = 128;

std::string text(List values) {
  std::string out;
  for (const int64_t value : values) out += (out.empty() ? "" : ", ") + std::to_string(value);
  return "[" + out + "]";
}

int64_t element_bytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

CUtensorMapDataType driver_type(ElementType type) {
  switch (type) {
    case ElementType::kBfloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case ElementType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case ElementType::kFloat32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
  throw std::logic_error("ikbo: unknown element type");
}

// The driver's function, found at run time: the library doesn't link libcuda.so, which machines
// without a GPU lack.
using Encoder = decltype(&cuTensorMapEncodeTiled);

Encoder encoder() {
  static std::once_flag found;
  static Encoder function;
  std::call_once(found, [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
    IKBO_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                     cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess || entry == nullptr) {
      throw std::runtime_error("ikbo: the CUDA driver has no cuTensorMapEncodeTiled.");
    }
    function = reinterpret_cast<Encoder>(entry);
  });
  return function;
}

// What is wrong with the request, or nothing.
const char* defect(const void* base, ElementType type, List sizes, List byte_strides, List box,
                   Swizzle swizzle) {
  const auto all = [](List values, auto holds) {
    return std::all_of(values.begin(), values.end(), holds);
  };
  if (sizes.size() < 2 || sizes.size() > 4 || byte_strides.size() + 1 != sizes.size() ||
      box.size() != sizes.size()) {
    return "2 to 4 sizes, as many box sizes and one stride fewer";
  }
  if (reinterpret_cast<uintptr_t>(base) % kAlignment != 0) return "a 16-byte aligned base";
  if (!all(sizes, [](int64_t size) { return size >= 1 && size <= kMaxSize; })) {
    return "sizes from 1 to 2^32";
  }
  if (!all(byte_strides, [](int64_t stride) {
        return stride >= 0 && stride < kMaxStride && stride % kAlignment == 0;
      })) {
    return "strides that are multiples of 16 bytes below 2^40";
  }
  if (!all(box, [](int64_t size) { return size >= 1 && size <= kMaxBox; })) {
    return "box sizes from 1 to 256";
  }
  const int64_t row_bytes = *box.begin() * element_bytes(type);
  if (row_bytes % kAlignment != 0) return "box rows of a multiple of 16 bytes";
  if (swizzle == Swizzle::k128Bytes && row_bytes > kSwizzleBytes) {
    return "box rows of at most 128 bytes under the 128-byte swizzle";
  }
  return nullptr;
}

}  // namespace

CUtensorMap make_tensor_map(const void* base, ElementType type, List sizes, List byte_strides,
                            List box, Swizzle swizzle) {
  const auto fail = [&](const std::string& reason) {
    throw std::runtime_error(
        "ikbo: no tensor map for sizes " + text(sizes) + ", byte strides " + text(byte_strides) +
        ", box " + text(box) + " (innermost first), base " +
        std::to_string(reinterpret_cast<uintptr_t>(base) % kAlignment) + " mod 16, element of " +
        std::to_string(element_bytes(type)) + " bytes: " + reason + ".");
  };
  if (const char* expected = defect(base, type, sizes, byte_strides, box, swizzle)) {
    fail(std::string("expected ") + expected);
  }
  std::array<cuuint64_t, 4> driver_sizes{};
  std::array<cuuint64_t, 3> driver_strides{};
  std::array<cuuint32_t, 4> driver_box{};
  std::array<cuuint32_t, 4> element_strides{1, 1, 1, 1};
  std::copy(sizes.begin(), sizes.end(), driver_sizes.begin());
  std::copy(byte_strides.begin(), byte_strides.end(), driver_strides.begin());
  std::copy(box.begin(), box.end(), driver_box.begin());
  CUtensorMap map;
  const CUresult status =
      encoder()(&map, driver_type(type), static_cast<cuuint32_t>(sizes.size()),
                const_cast<void*>(base), driver_sizes.data(), driver_strides.data(),
                driver_box.data(), element_strides.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle == Swizzle::kNone ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) fail("the driver's error " + std::to_string(status));
  return map;
}

}  // namespace ikbo
