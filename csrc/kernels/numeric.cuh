// Between fp32 sums and the 16-bit types, two at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ikbo {

template <class T>
__device__ inline uint32_t pack(float low, float high);

template <>
__device__ inline uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ inline uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <class T>
__device__ inline float2 unpack(uint32_t pair);

template <>
__device__ inline float2 unpack<__nv_bfloat16>(uint32_t pair) {
  // An instruction each; cuda_bf16.h takes two for the upper one.
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <>
__device__ inline float2 unpack<__half>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

}  // namespace ikbo
