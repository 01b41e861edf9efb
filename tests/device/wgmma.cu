// One product of two tiles by wgmma: every N asked for, type, operand major and source of A.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "entry.h"
#include "hopper/mbarrier.cuh"
#include "hopper/swizzle.cuh"
#include "hopper/tma.cuh"
#include "hopper/warp_group.cuh"
#include "hopper/wgmma.cuh"

namespace ikbo {
namespace {

using hopper::Major;

constexpr int kM = 64;
constexpr int kK = 64;  // one 128-byte row of K

// Where element (mn, k) of an operand stands in its swizzled tile, in bytes. MN-major tiles are
// blocks of 64 columns side by side.
template <Major kMajor>
__device__ uint32_t element_offset(int mn, int k) {
  if constexpr (kMajor == Major::kK) return hopper::swizzle_128(mn, 2 * k);
  return mn / 64 * (kK * hopper::kSwizzleRowBytes) + hopper::swizzle_128(k, mn % 64 * 2);
}

// d[64][kN] = first + a[64][64] b[kN][64]^T, where `first` is what d held if `add`.
template <class T, int kN, Major kMajorA, Major kMajorB, bool kARegisters>
__global__ void __launch_bounds__(128)
    wgmma_test_kernel(const T* a, const T* b, float* d, bool add) {
  constexpr int kBBlocks = kMajorB == Major::kK ? 1 : (kN + 63) / 64;
  constexpr int kBBytes = kMajorB == Major::kK ? (kN + 7) / 8 * 1024 : kBBlocks * kK * 128;
  extern __shared__ __align__(1024) char shared[];
  char* a_tile = shared;
  char* b_tile = shared + kM * 128;
  // What the products must not read is NaN.
  for (int i = threadIdx.x; i < (kM * 128 + kBBytes) / 2; i += 128) {
    reinterpret_cast<T*>(shared)[i] = T(__int_as_float(0x7fffffff));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kM * kK; i += 128) {
    *reinterpret_cast<T*>(a_tile + element_offset<kMajorA>(i / kK, i % kK)) = a[i];
  }
  for (int i = threadIdx.x; i < kN * kK; i += 128) {
    *reinterpret_cast<T*>(b_tile + element_offset<kMajorB>(i / kK, i % kK)) = b[i];
  }
  hopper::fence_shared_for_async();
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 * 16 + lane / 4;
  const int column = 2 * (lane % 4);
  float sums[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    sums[i] = d[(row + i / 2 % 2 * 8) * kN + i / 4 * 8 + column + i % 2];
  }
  uint32_t fragments[kK / 16][4];
  if constexpr (kARegisters) {
#pragma unroll
    for (int i = 0; i < kK / 16 * 4; ++i) {
      const T* pair = a + (row + i % 2 * 8) * kK + i / 4 * 16 + i / 2 % 2 * 8 + column;
      fragments[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(pair);
    }
  }
  const uint64_t a_descriptor = hopper::descriptor<kMajorA>(a_tile, kK * 128);
  const uint64_t b_descriptor = hopper::descriptor<kMajorB>(b_tile, kK * 128);
  using Instruction = hopper::Wgmma<T, kN, kMajorA, kMajorB>;
  hopper::fence_registers(sums);
  hopper::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kK / 16; ++step) {
    const uint64_t b_step = b_descriptor + step * hopper::kDescriptorStep<kMajorB>;
    if constexpr (kARegisters) {
      Instruction::multiply_registers(sums, fragments[step], b_step, add || step > 0);
    } else {
      const uint64_t a_step = a_descriptor + step * hopper::kDescriptorStep<kMajorA>;
      Instruction::multiply(sums, a_step, b_step, add || step > 0);
    }
  }
  hopper::wgmma_commit();
  hopper::wgmma_wait<0>();
  hopper::fence_registers(sums);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    d[(row + i / 2 % 2 * 8) * kN + i / 4 * 8 + column + i % 2] = sums[i];
  }
}

template <class T, int kN, Major kMajorA, Major kMajorB, bool kARegisters = false>
void run(const void* a, const void* b, float* d, bool add, cudaStream_t stream) {
  constexpr int kBBytes = kMajorB == Major::kK ? kN * 128 : (kN + 63) / 64 * kK * 128;
  launch(wgmma_test_kernel<T, kN, kMajorA, kMajorB, kARegisters>, {1, 128, kM * 128 + kBBytes},
         stream, static_cast<const T*>(a), static_cast<const T*>(b), d, add);
}

template <class T, int kN>
void run_majors(int form, const void* a, const void* b, float* d, bool add, cudaStream_t stream) {
  switch (form) {
    case 0:
      return run<T, kN, Major::kK, Major::kK>(a, b, d, add, stream);
    case 1:
      return run<T, kN, Major::kK, Major::kMn>(a, b, d, add, stream);
    case 2:
      return run<T, kN, Major::kMn, Major::kK>(a, b, d, add, stream);
    case 3:
      return run<T, kN, Major::kMn, Major::kMn>(a, b, d, add, stream);
    case 4:
      return run<T, kN, Major::kK, Major::kK, true>(a, b, d, add, stream);
    case 5:
      return run<T, kN, Major::kK, Major::kMn, true>(a, b, d, add, stream);
  }
}

template <class T>
void run_n(int n, int form, const void* a, const void* b, float* d, bool add, cudaStream_t stream) {
  switch (n) {
    case 8:
      return run_majors<T, 8>(form, a, b, d, add, stream);
    case 64:
      return run_majors<T, 64>(form, a, b, d, add, stream);
    case 128:
      return run_majors<T, 128>(form, a, b, d, add, stream);
    case 224:
      return run_majors<T, 224>(form, a, b, d, add, stream);
    case 256:
      return run_majors<T, 256>(form, a, b, d, add, stream);
  }
}

}  // namespace
}  // namespace ikbo

// a[64][64], b[n][64], d[64][n] fp32. Forms: 2 * (A is M-major) + (B is N-major); 4, 5: A in
// registers.
IKBO_TEST_ENTRY ikbo_test_wgmma(int n, int form, bool bf16, const void* a, const void* b, float* d,
                                bool add, cudaStream_t stream) {
  return ikbo::entry([&] {
    const auto run_type = bf16 ? ikbo::run_n<__nv_bfloat16> : ikbo::run_n<__half>;
    run_type(n, form, a, b, d, add, stream);
  });
}
