// What the linear compression kernels share: a consumer's tile of 64 columns by kTileM rows of W.
#pragma once

#include <cstdint>

#include "config/linear_compression.h"
#include "hopper/fragments.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/swizzle.cuh"
#include "hopper/warp_group.cuh"
#include "hopper/wgmma.cuh"

namespace ikbo::linear_compression {

inline constexpr int kSwizzleK = LinearCompressionKernel::kSwizzleK;
inline constexpr int kUnitColumns = LinearCompressionKernel::kUnitColumns;
inline constexpr int kConsumers = LinearCompressionKernel::kConsumers;
inline constexpr int kGroupThreads = hopper::kWarpGroupThreads;
inline constexpr int32_t kPaddingUser = -1;

// Named barriers (0 is __syncthreads), each of a consumer's own 128 threads: + consumer.
enum class NamedBarrier {
  kStarted = 1,  // its thread 0 has waited out the blocks before its first tile
  kStaged = 3,   // its results are in its staging buffers
};

// One of kLinearCompressionKernels for one element type.
template <class T_, int kKernel>
struct Shape {
  using T = T_;
  static constexpr int kIndex = kKernel;
  static constexpr LinearCompressionKernel kConfig = kLinearCompressionKernels[kKernel];
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileK = kConfig.tile_k;
  static constexpr int kStaging = kConfig.staging_buffers;
  using RingW = hopper::Pipeline<kConfig.w_stages, kConsumers>;
  using RingE = hopper::Pipeline<kConfig.e_stages, 1>;
};

struct Unit {
  int32_t row;
  int32_t first_n;
};
__device__ inline Unit unit_at(int32_t index, int32_t units_per_row) {
  return {index / units_per_row, index % units_per_row * kUnitColumns};
}

template <class S>
using Sums = float[S::kTileM / 2];

// One step of K: reads the slots, adds to the sums. `add` false starts them. A slot of W has its
// swizzle spans of K one after the other.
template <class S>
__device__ inline void multiply(Sums<S>& sums, uint64_t e, uint64_t w, bool add) {
  using Product = hopper::Wgmma<typename S::T, S::kTileM, hopper::Major::kMn, hopper::Major::kK>;
#pragma unroll
  for (int k = 0; k < S::kTileK / 16; ++k) {
    constexpr int kSpan = kSwizzleK / 16;
    const uint32_t in_w = k / kSpan * (S::kTileM * hopper::kSwizzleRowBytes / 16) +
                          k % kSpan * hopper::kDescriptorStep<hopper::Major::kK>;
    Product::multiply(sums, hopper::moved(e, k * hopper::kDescriptorStep<hopper::Major::kMn>),
                      hopper::moved(w, in_w), add || k > 0);
  }
}

// Places in the rings of W and of a consumer's E.
template <class S>
struct Slots {
  typename S::RingW::Position w;
  typename S::RingE::Position e;
};

// Multiplies the next `blocks` (at least 1) blocks of K; w and e describe slot 0 of each ring. The
// products of the last may still run: the caller waits, then release_last().
template <class S>
__device__ inline void multiply_blocks(typename S::RingW& ring_w, typename S::RingE& ring_e,
                                       Slots<S>& at, uint64_t w, uint64_t e, int32_t blocks,
                                       Sums<S>& sums) {
  constexpr uint32_t kSlotW = S::kConfig.w_bytes() / 16;  // descriptors count in 16 bytes
  constexpr uint32_t kSlotE = S::kConfig.e_bytes() / 16;
  const uint32_t thread = hopper::thread_of_group();
  bool is_there = false;
  for (int32_t i = 0; i < blocks; ++i) {
    if (!is_there) {
      ring_w.wait_full(at.w);
      ring_e.wait_full(at.e);
    }
    hopper::wgmma_fence();
    multiply<S>(sums, hopper::moved(e, at.e.slot * kSlotE), hopper::moved(w, at.w.slot * kSlotW),
                i > 0);
    hopper::wgmma_commit();
    at.w.advance();
    at.e.advance();
    is_there = ring_w.is_full(at.w) & ring_e.is_full(at.e);  // after the last block nobody asks
    hopper::wgmma_wait<1>();  // the products of the block before have read the slots
    if (i > 0) {
      ring_w.release(at.w.slot_before(2), thread);
      ring_e.release(at.e.slot_before(2), thread);
    }
  }
}

template <class S>
__device__ inline void release_last(typename S::RingW& ring_w, typename S::RingE& ring_e,
                                    const Slots<S>& at) {
  ring_w.release(at.w.slot_before(1));
  ring_e.release(at.e.slot_before(1));
}

// A lane's 16-bit results, or its share of the part: pair i is sums 2i and 2i + 1, one column and
// two neighbouring rows of W.
template <class S>
using Pairs = uint32_t[S::kTileM / 4];

// Where a lane's pairs are in a staging buffer, for ldmatrix and stmatrix. The buffer has a row of
// 64 columns (128 bytes, swizzled) for each row of W. Lane l of warp w holds, of the sums, rows 16w
// + l/4 (+ 8) of the 64 columns and 2(l % 4) (+ 1) of each 8 rows of W. Transposed, that is four 8
// x 8 tiles of the buffer for each 16 rows of W: both halves of the warp's columns, then 8 rows
// further. So a warp reads and writes columns of its own.
template <class T>
__device__ inline char* staging_of_lane(T* staging) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  const uint32_t byte = (warp * 16 + lane / 8 % 2 * 8) * sizeof(T);
  return reinterpret_cast<char*>(staging) + hopper::swizzle_128(lane / 16 * 8 + lane % 8, byte);
}

}  // namespace ikbo::linear_compression
