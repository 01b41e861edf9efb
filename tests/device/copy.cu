// A plain copy in several forms: what a kernel bound by memory is measured against.

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "entry.h"

namespace {

constexpr int kThreads = 256;

// to = a, or a ^ b. A thread has kVectors of 16 bytes at a time, kThreads apart.
template <int kReads, int kVectors, bool kStreaming>
__global__ void __launch_bounds__(kThreads)
    copy_sm90(const uint4* __restrict__ a, const uint4* __restrict__ b, uint4* __restrict__ to,
              int64_t count) {
  constexpr int kBlock = kThreads * kVectors;
  for (int64_t block = blockIdx.x; block * kBlock < count; block += gridDim.x) {
    const int64_t first = block * kBlock + threadIdx.x;
    uint4 values[kVectors], others[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = first + v * kThreads;
      if (i >= count) break;
      values[v] = a[i];
      if constexpr (kReads == 2) others[v] = b[i];
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = first + v * kThreads;
      if (i >= count) break;
      uint4 value = values[v];
      if constexpr (kReads == 2) {
        value.x ^= others[v].x, value.y ^= others[v].y;
        value.z ^= others[v].z, value.w ^= others[v].w;
      }
      if constexpr (kStreaming) {
        __stcs(to + i, value);
      } else {
        to[i] = value;
      }
    }
  }
}

// A CTA for each block, or 8 an SM that take turns.
template <int kVectors, bool kStreaming, bool kPersistent = false>
void copy(const void* a, const void* b, void* to, int64_t bytes, cudaStream_t stream) {
  const int64_t count = bytes / 16, blocks = (count - 1) / (kThreads * kVectors) + 1;
  int64_t grid = blocks;
  if (kPersistent) {
    int device, sms;
    IKBO_CUDA_CHECK(cudaGetDevice(&device));
    IKBO_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    grid = std::min<int64_t>(blocks, 8 * sms);
  }
  ikbo::launch(
      b == nullptr ? copy_sm90<1, kVectors, kStreaming> : copy_sm90<2, kVectors, kStreaming>,
      {static_cast<unsigned>(grid), kThreads}, stream, static_cast<const uint4*>(a),
      static_cast<const uint4*>(b), static_cast<uint4*>(to), count);
}

}  // namespace

// to = a, or a ^ b where b isn't null; bytes a multiple of 16. The forms: 1 or 4 vectors a thread,
// with plain (0, 2) or streaming stores (1, 3), and 2 a thread of a persistent CTA, streaming (4).
IKBO_TEST_ENTRY ikbo_test_copy(const void* a, const void* b, void* to, int64_t bytes, int form,
                               cudaStream_t stream) {
  return ikbo::entry([&] {
    if (bytes < 16 || bytes % 16 != 0) throw std::runtime_error("expected multiples of 16 bytes");
    if (form == 0) return copy<1, false>(a, b, to, bytes, stream);
    if (form == 1) return copy<1, true>(a, b, to, bytes, stream);
    if (form == 2) return copy<4, false>(a, b, to, bytes, stream);
    if (form == 3) return copy<4, true>(a, b, to, bytes, stream);
    if (form == 4) return copy<2, true, true>(a, b, to, bytes, stream);
    throw std::runtime_error("expected a form from 0 to 4");
  });
}
