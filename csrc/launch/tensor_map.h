// Tensor maps: what the copy engine knows of a tensor in global memory.
#pragma once

#include <cuda.h>  // CUtensorMap

#include <cstdint>
#include <initializer_list>

namespace ikbo {

enum class ElementType { kBfloat16, kFloat16, kFloat32 };
enum class Swizzle { kNone, k128Bytes };

// The map of a tensor of 2 to 4 dimensions, innermost first; the innermost is contiguous.
//   sizes         elements; each at least 1
//   byte_strides  of the outer dimensions, one fewer than sizes; multiples of 16
//   box           elements that one copy moves; out-of-range ones read as zero and aren't written
// L2 fetches 128 bytes at a time: fetching a row's next 128 too made gated_mlp of 16 tokens,
// 4096 x 11008, which reads weights once, 3 % slower in calls one after another.
// Throws std::runtime_error with sizes, strides and box where the copy engine has no such map.
CUtensorMap make_tensor_map(const void* base, ElementType type,
                            std::initializer_list<int64_t> sizes,
                            std::initializer_list<int64_t> byte_strides,
                            std::initializer_list<int64_t> box, Swizzle swizzle);

}  // namespace ikbo
