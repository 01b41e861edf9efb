// A warp's matrix product m16n8k16 of 16-bit operands with fp32 sums, all of it in registers: for
// products too small for wgmma.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ikbo::hopper {

// D += A B. Two elements a register; lane l, with g = l / 4 and t = l % 4, holds
//   a  rows g (a[0], a[2]) and g + 8 (a[1], a[3]), k 2t (+ 1), in a[2] and a[3] 8 further
//   b  column g, k 2t (+ 1), in b[1] 8 further
//   d  rows g (d[0], d[1]) and g + 8 (d[2], d[3]), columns 2t (+ 1)
// Any order of k will do that is the same in A and B.
template <class T>
__device__ inline void multiply_16x8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

#define IKBO_MULTIPLY_16X8(T, NAME)                                                     \
  template <>                                                                           \
  __device__ inline void multiply_16x8<T>(float (&d)[4], const uint32_t (&a)[4],        \
                                          const uint32_t (&b)[2]) {                     \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                 \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));   \
  }
IKBO_MULTIPLY_16X8(__half, "f16")
IKBO_MULTIPLY_16X8(__nv_bfloat16, "bf16")
#undef IKBO_MULTIPLY_16X8

}  // namespace ikbo::hopper
