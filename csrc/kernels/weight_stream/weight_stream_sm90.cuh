// out[M, N] = act(x[M, K] w[N, K]^T + b) of few tokens, and with two weights
// act(x wg^T + bg) * (x wu^T + bu). The tile is turned around: 64 features of each weight are
// wgmma's rows and the tokens its columns, so that none of a wgmma is wasted on tokens that aren't
// there and every byte of the ring is one of a weight or of x. More tokens than 64 are several
// tiles, for products too small for the GEMM's.
//
// A CTA is five warps, and two CTAs share an SM:
// - Warps 0 to 3, consumers. They wait for a slot to be full, run wgmma on it and release the slot
//   before it.
// - Warp 4, producer. One lane waits for a slot to be empty and issues the TMA loads of the next
//   64-deep K block: 64 rows of each weight, all rows of x. Where the kernel ahead computes x, the
//   weights of the ring's first blocks are on their way before it is waited for.
// With a cluster (split > 1) each CTA takes a part of K. At the end the sums, in fp32, take the
// ring's place in shared memory, turned to [token][feature]; all CTAs of the cluster meet; each
// adds up its share of the features over the CTAs, always in the order of K, and finishes it.
#pragma once

#include "config/activation.h"
#include "config/fast_divisor.h"
#include "config/weight_stream.h"
#include "hopper/cluster.cuh"
#include "hopper/dependent_launch.cuh"
#include "hopper/mbarrier.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/swizzle.cuh"
#include "hopper/tma.cuh"
#include "hopper/warp_group.cuh"
#include "hopper/wgmma.cuh"
#include "kernels/activation.cuh"
#include "kernels/numeric.cuh"

namespace ikbo::weight_stream {

inline constexpr int kRows = WeightStreamKernel::kRows;
inline constexpr int kTileK = WeightStreamKernel::kTileK;
inline constexpr int kThreads = WeightStreamKernel::kThreads;

enum class NamedBarrier { kConsumers = 1 };  // 0 is __syncthreads

template <class T_, int kTokens_, int kWeights_>
struct Shape {
  using T = T_;
  static constexpr int kTokens = kTokens_, kWeights = kWeights_;
  static constexpr int kStages = WeightStreamKernel{kTokens, kWeights}.stages();
  using Ring = hopper::Pipeline<kStages, 1>;
  using Position = typename Ring::Position;
  using Product = hopper::Wgmma<T, kTokens, hopper::Major::kK, hopper::Major::kK>;
};

template <class S>
struct alignas(hopper::kSwizzleAtomBytes) Shared {
  struct Slot {
    typename S::T w[S::kWeights][kRows * kTileK];
    typename S::T x[S::kTokens * kTileK];
  };
  union {
    Slot slots[S::kStages];
    float sums[S::kWeights][S::kTokens][WeightStreamKernel::kPitch];
  };
  typename S::Ring ring;
  uint32_t bias[S::kWeights][kRows / 2];  // of this CTA's features, in pairs; zeros where none
};

struct Params {
  CUtensorMap w[2];     // [N, K], box 64 x 64, 128-byte swizzle; the second only with two weights
  CUtensorMap x;        // [M, K], box of M rounded up to 8, or of 64, x 64; likewise
  const void* bias[2];  // [N] in T, 16-byte aligned; or null
  void* out;            // [M, N] in T, rows out_stride elements apart, 16-byte aligned
  void* preact[2];      // [M, N] in T, contiguous, 16-byte aligned: the sums before the activation;
                        // or null
  int64_t out_stride;
  int32_t M, N;  // N a multiple of 8
  FastDivisor token_tiles;
  int32_t k_steps;
  int32_t split;  // CTAs of a cluster: 1, 2, 4 or 8, at most k_steps
  int32_t split_log2;
  uint32_t load_bytes;  // of a K block
  hopper::L2Hint weight_hint;
  Activation activation;
  bool x_is_under_way;  // the kernel ahead on the stream computes x: it is waited for before x's
                        // first load, otherwise before memory is touched
};

// What a CTA computes.
struct Work {
  int32_t first_feature;
  int32_t first_token, tokens;
  int32_t rank;  // in its cluster
  int32_t first_step, steps;

  __device__ explicit Work(const Params& p) {
    const auto cta = static_cast<int32_t>(blockIdx.x), tile = cta >> p.split_log2;
    rank = cta & (p.split - 1);
    // Neighbours share a weight's rows.
    const int32_t feature_tile = p.token_tiles.divide(tile);
    first_feature = feature_tile * kRows;
    first_token = p.token_tiles.remainder(tile, feature_tile) * WeightStreamKernel::kMaxTokens;
    tokens = min(p.M - first_token, WeightStreamKernel::kMaxTokens);
    first_step = p.k_steps * rank >> p.split_log2;
    steps = (p.k_steps * (rank + 1) >> p.split_log2) - first_step;
  }
};

template <class S>
__device__ inline void load_weights(Shared<S>& shared, const Params& p, const Work& work, int step,
                                    int slot) {
#pragma unroll
  for (int i = 0; i < S::kWeights; ++i) {
    hopper::tma_load(shared.slots[slot].w[i], p.w[i], shared.ring.full[slot], p.weight_hint,
                     (work.first_step + step) * kTileK, work.first_feature);
  }
}
template <class S>
__device__ inline void load_x(Shared<S>& shared, const Params& p, const Work& work, int step,
                              int slot) {
  hopper::tma_load(shared.slots[slot].x, p.x, shared.ring.full[slot], hopper::L2Hint::kNormal,
                   (work.first_step + step) * kTileK, work.first_token);
}

// One thread: what the ring's first blocks will hold, into L2, while the kernel ahead still runs.
template <class S>
__device__ void ask_early(const Params& p, const Work& work) {
  for (int i = 0; i < S::kWeights; ++i) {
    hopper::prefetch_tensor_map(p.w[i]);
    if (p.x_is_under_way) continue;  // the blocks themselves are about to be loaded
    for (int step = 0; step < min(S::kStages, work.steps); ++step) {
      hopper::prefetch_box(p.w[i], (work.first_step + step) * kTileK, work.first_feature);
    }
  }
  hopper::prefetch_tensor_map(p.x);
}

// One lane, in two steps that share no variables: only where a lane is elected right before does
// the compiler know that what it computes needs no loop over lanes to reach the copy engine.

// Fills the ring, with x where it is there.
template <class S>
__device__ void begin_producing(Shared<S>& shared, const Params& p, const Work& work) {
  for (int step = 0; step < min(S::kStages, work.steps); ++step) {
    hopper::arrive_expect_bytes(shared.ring.full[step], p.load_bytes);
    load_weights(shared, p, work, step, step);
    if (!p.x_is_under_way) load_x(shared, p, work, step, step);
  }
}

template <class S>
__device__ void produce(Shared<S>& shared, const Params& p, const Work& work) {
  const int ahead = min(S::kStages, work.steps);
  if (p.x_is_under_way) {
    hopper::wait_for_previous_kernel();
    for (int step = 0; step < ahead; ++step) load_x(shared, p, work, step, step);
  }
  typename S::Position position;
  position.advance(ahead);
  for (int step = ahead; step < work.steps; ++step, position.advance()) {
    shared.ring.produce(position, p.load_bytes);
    load_weights(shared, p, work, step, position.slot);
    load_x(shared, p, work, step, position.slot);
  }
  hopper::allow_next_kernel();  // whose weights follow these
}

// Leaves the sums over the CTA's part of K in shared memory.
template <class S>
__device__ void consume(Shared<S>& shared, const Params& p, const Work& work) {
  constexpr uint32_t kStep = hopper::kDescriptorStep<hopper::Major::kK>;
  constexpr uint32_t kSlot = sizeof(typename Shared<S>::Slot) / 16;  // descriptors count in these
  uint64_t w[S::kWeights];
#pragma unroll
  for (int i = 0; i < S::kWeights; ++i) {
    w[i] = hopper::descriptor<hopper::Major::kK>(shared.slots[0].w[i]);
  }
  const uint64_t x = hopper::descriptor<hopper::Major::kK>(shared.slots[0].x);
  const uint32_t thread = hopper::thread_of_group();
  float sums[S::kWeights][S::kTokens / 2];
  typename S::Position position;
  bool is_there = false;
  for (int step = 0; step < work.steps; ++step) {
    if (!is_there) shared.ring.wait_full(position);
    const uint32_t slot = position.slot * kSlot;
    hopper::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
#pragma unroll
      for (int i = 0; i < S::kWeights; ++i) {
        S::Product::multiply(sums[i], hopper::moved(w[i], slot + k * kStep),
                             hopper::moved(x, slot + k * kStep), step > 0 || k > 0);
      }
    }
    hopper::wgmma_commit();
    position.advance();
    is_there = shared.ring.is_full(position);  // after the last block nobody asks
    hopper::wgmma_wait<1>();                   // the products of the block before have read it
    if (step > 0) shared.ring.release(position.slot_before(2), thread);
  }
  hopper::wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < S::kWeights; ++i) hopper::fence_registers(sums[i]);
  // All loads have arrived and been read: the sums take the ring's place.
  hopper::barrier_wait(NamedBarrier::kConsumers, WeightStreamKernel::kConsumerThreads);
  const int feature = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < S::kWeights; ++i) {
#pragma unroll
    for (int block = 0; block < S::kTokens / 8; ++block) {
      const int token = 8 * block + threadIdx.x % 4 * 2;
      if (8 * block >= work.tokens) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        shared.sums[i][token + j % 2][feature + j / 2 * 8] = sums[i][4 * block + j];
      }
    }
  }
}

template <class T>
__device__ inline void store_four(void* row, int32_t column, const float (&values)[4]) {
  *reinterpret_cast<uint2*>(static_cast<T*>(row) + column) = {pack<T>(values[0], values[1]),
                                                              pack<T>(values[2], values[3])};
}

// Adds up this CTA's share of the features over the cluster, four of a token at a time.
template <class S>
__device__ void finish(Shared<S>& shared, const Params& p, const Work& work) {
  using T = typename S::T;
  const int quads_log2 = 4 - p.split_log2;
  static_assert(kRows / 4 == 1 << 4);
  for (int i = threadIdx.x; i < work.tokens << quads_log2; i += kThreads) {
    const int token = i >> quads_log2, quad = i & ((1 << quads_log2) - 1);
    const int64_t row = work.first_token + token;
    const int feature = 4 * ((work.rank << quads_log2) + quad);
    const int32_t column = work.first_feature + feature;
    if (column >= p.N) continue;
    float4 parts[S::kWeights][WeightStreamKernel::kMaxSplit];
#pragma unroll
    for (int rank = 0; rank < WeightStreamKernel::kMaxSplit; ++rank) {
      if (rank >= p.split) break;
#pragma unroll
      for (int j = 0; j < S::kWeights; ++j) {
        parts[j][rank] = hopper::load_in_cluster(
            reinterpret_cast<const float4*>(&shared.sums[j][token][feature]), rank);
      }
    }
    float values[S::kWeights][4];
#pragma unroll
    for (int j = 0; j < S::kWeights; ++j) {
      float4 sum = parts[j][0];
#pragma unroll
      for (int rank = 1; rank < WeightStreamKernel::kMaxSplit; ++rank) {
        if (rank >= p.split) break;
        const float4& part = parts[j][rank];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      const float2 low = unpack<T>(shared.bias[j][feature / 2]);
      const float2 high = unpack<T>(shared.bias[j][feature / 2 + 1]);
      values[j][0] = sum.x + low.x, values[j][1] = sum.y + low.y;
      values[j][2] = sum.z + high.x, values[j][3] = sum.w + high.y;
      if (p.preact[j] != nullptr) {
        store_four<T>(static_cast<T*>(p.preact[j]) + row * p.N, column, values[j]);
      }
    }
    with_activation(p.activation, [&](auto activation) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[0][j] = apply<decltype(activation)::value>(values[0][j]);
        if constexpr (S::kWeights == 2) values[0][j] *= values[1][j];
      }
    });
    store_four<T>(static_cast<T*>(p.out) + row * p.out_stride, column, values[0]);
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, WeightStreamKernel::kCtasPerSm)
    weight_stream_sm90(const __grid_constant__ Params p) {
  extern __shared__ char unaligned[];
  constexpr uint32_t kAtom = hopper::kSwizzleAtomBytes;
  const uint32_t base = hopper::shared_address(unaligned);
  auto& shared = *reinterpret_cast<Shared<S>*>(unaligned + (kAtom - base % kAtom) % kAtom);
  const Work work(p);
  const bool produces = hopper::warp_index() == WeightStreamKernel::kConsumerThreads / 32;
  if (produces) {
    shared.ring.init_by_warp();
    hopper::fence_barrier_init();
  } else if (threadIdx.x == 0) {
    ask_early<S>(p, work);
  }
  if (!p.x_is_under_way) hopper::wait_for_previous_kernel();
  if (produces) {
    __syncwarp();
    if (hopper::elect_one()) begin_producing(shared, p, work);
  } else if (threadIdx.x < S::kWeights * (kRows / 2)) {
    const int weight = threadIdx.x / (kRows / 2), pair = threadIdx.x % (kRows / 2);
    const auto* bias = static_cast<const uint32_t*>(p.bias[weight]);
    const int column = work.first_feature + 2 * pair;
    const bool is_there = bias != nullptr && column < p.N;
    shared.bias[weight][pair] = is_there ? bias[column / 2] : 0;
  }
  __syncthreads();
  if (produces) {
    if (hopper::elect_one()) produce(shared, p, work);
    __syncwarp();
  } else {
    consume(shared, p, work);
  }
  const auto meet = [&] {
    if (p.split > 1) {
      hopper::cluster_sync();
    } else {
      __syncthreads();
    }
  };
  meet();
  finish(shared, p, work);
  // The others of the cluster may still read this CTA's sums.
  if (p.split > 1) hopper::cluster_sync();
}

}  // namespace ikbo::weight_stream
