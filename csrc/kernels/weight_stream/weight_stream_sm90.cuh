// out[M, N] = act(x[M, K] w[N, K]^T + b) of few tokens, and with two weights
// act(x wg^T + bg) * (x wu^T + bu). The tile is turned around: up to 128 features of one weight, or
// 64 of each of two, are wgmma's rows and the tokens its columns, so that none of a wgmma is wasted
// on tokens that aren't there and every byte of the ring is one of a weight or of x. More tokens
// than 64 are several tiles, for products too small for the GEMM's.
//
// A CTA is five warps, and two CTAs share an SM:
// - Warps 0 to 3, consumers. They wait for a slot to be full, run wgmma on it and release the slot
//   before it.
// - Warp 4, producer. One lane waits for a slot to be empty and issues the TMA loads of the next
//   block of K, 64 or 128 deep: 128 rows of weights, all rows of x. Where the kernel ahead computes
//   x, the weights of the ring's first blocks are on their way before it is waited for.
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
inline constexpr int kBoxK = WeightStreamKernel::kBoxK;
inline constexpr int kThreads = WeightStreamKernel::kThreads;

enum class NamedBarrier { kConsumers = 1 };  // 0 is __syncthreads

template <class T_, int kTokens_, int kWeights_>
struct Shape {
  using T = T_;
  static constexpr int kTokens = kTokens_, kWeights = kWeights_;
  static constexpr WeightStreamKernel kKernel{kTokens, kWeights};
  static constexpr int kStages = kKernel.stages();
  static constexpr int kBoxes = kKernel.boxes(), kTileK = kKernel.tile_k();
  static constexpr int kFeatures = kKernel.features();  // of each weight
  static constexpr int kWgmmas = kFeatures / 64;        // 64 features each
  using Ring = hopper::Pipeline<kStages, 1>;
  using Position = typename Ring::Position;
  using Product = hopper::Wgmma<T, kTokens, hopper::Major::kK, hopper::Major::kK>;
};

template <class S>
struct alignas(hopper::kSwizzleAtomBytes) Shared {
  struct Slot {
    typename S::T w[S::kWeights][S::kBoxes][S::kFeatures * kBoxK];
    typename S::T x[S::kBoxes][S::kTokens * kBoxK];
  };
  union {
    Slot slots[S::kStages];
    float sums[S::kWeights][S::kTokens][S::kKernel.pitch()];
  };
  typename S::Ring ring;
  uint32_t bias[S::kWeights]
               [S::kFeatures / 2];  // of this CTA's features, in pairs; zeros where none
};

struct Params {
  CUtensorMap w[2];  // [N, K], box of `features` x 64, 128-byte swizzle; the second only with two
                     // weights
  CUtensorMap x;     // [M, K], box of M rounded up to 8, or of 64, x 64; likewise
  const void* bias[2];  // [N] in T, 16-byte aligned; or null
  void* out;            // [M, N] in T, rows out_stride elements apart, 16-byte aligned
  void* preact[2];      // [M, N] in T, contiguous, 16-byte aligned: the sums before the activation;
                        // or null
  int64_t out_stride;
  int32_t M, N;      // N a multiple of 8
  int32_t features;  // of a tile, at most kFeatures: what stands in the rows behind is never read
  FastDivisor token_tiles;
  int32_t k_steps;
  int32_t split;  // CTAs of a cluster: 1, 2, 4 or 8, at most k_steps
  int32_t split_log2;
  int32_t quads_log2;   // 2^quads_log2 times four features are at least a CTA's share of a tile
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
    first_feature = feature_tile * p.features;
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
#pragma unroll
    for (int k = 0; k < S::kBoxes; ++k) {
      hopper::tma_load(shared.slots[slot].w[i][k], p.w[i], shared.ring.full[slot], p.weight_hint,
                       (work.first_step + step) * S::kTileK + k * kBoxK, work.first_feature);
    }
  }
}
template <class S>
__device__ inline void load_x(Shared<S>& shared, const Params& p, const Work& work, int step,
                              int slot) {
#pragma unroll
  for (int k = 0; k < S::kBoxes; ++k) {
    hopper::tma_load(shared.slots[slot].x[k], p.x, shared.ring.full[slot], hopper::L2Hint::kNormal,
                     (work.first_step + step) * S::kTileK + k * kBoxK, work.first_token);
  }
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
  constexpr uint32_t kUnit = 16;  // what descriptors count in
  constexpr uint32_t kSlot = sizeof(typename Shared<S>::Slot) / kUnit;
  constexpr uint32_t kRowBytes = kBoxK * sizeof(typename S::T);
  constexpr uint32_t kWBox = S::kFeatures * kRowBytes / kUnit,
                     kXBox = S::kTokens * kRowBytes / kUnit;
  constexpr uint32_t kWgmmaRows = 64 * kRowBytes / kUnit;
  uint64_t w[S::kWeights];
#pragma unroll
  for (int i = 0; i < S::kWeights; ++i) {
    w[i] = hopper::descriptor<hopper::Major::kK>(shared.slots[0].w[i][0]);
  }
  const uint64_t x = hopper::descriptor<hopper::Major::kK>(shared.slots[0].x[0]);
  const uint32_t thread = hopper::thread_of_group();
  float sums[S::kWeights][S::kWgmmas][S::kTokens / 2];
  typename S::Position position;
  bool is_there = false;
  for (int step = 0; step < work.steps; ++step) {
    if (!is_there) shared.ring.wait_full(position);
    const uint32_t slot = position.slot * kSlot;
    hopper::wgmma_fence();
#pragma unroll
    for (int k = 0; k < S::kTileK / 16; ++k) {
      constexpr int kInBox = kBoxK / 16;
      const uint32_t in_box = k % kInBox * kStep;
#pragma unroll
      for (int i = 0; i < S::kWeights; ++i) {
#pragma unroll
        for (int j = 0; j < S::kWgmmas; ++j) {
          S::Product::multiply(
              sums[i][j], hopper::moved(w[i], slot + k / kInBox * kWBox + j * kWgmmaRows + in_box),
              hopper::moved(x, slot + k / kInBox * kXBox + in_box), step > 0 || k > 0);
        }
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
  for (int i = 0; i < S::kWeights; ++i) {
#pragma unroll
    for (int j = 0; j < S::kWgmmas; ++j) hopper::fence_registers(sums[i][j]);
  }
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
      for (int j = 0; j < S::kWgmmas; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          shared.sums[i][token + v % 2][64 * j + feature + v / 2 * 8] = sums[i][j][4 * block + v];
        }
      }
    }
  }
}

template <class T>
__device__ inline void store_four(void* row, int32_t column, const float (&values)[4]) {
  *reinterpret_cast<uint2*>(static_cast<T*>(row) + column) = {pack<T>(values[0], values[1]),
                                                              pack<T>(values[2], values[3])};
}

// Adds up this CTA's share of the features over the cluster, four of a token at a time. A thread
// has up to four tokens in hand: one after another each would wait for its loads and exponentials
// alone (gate and up of 64 tokens: 4,400 clocks).
template <class S>
__device__ void finish(Shared<S>& shared, const Params& p, const Work& work) {
  using T = typename S::T;
  constexpr int kInHand = S::kTokens == 16 ? 2 : 4;
  constexpr int kRanksAtOnce = 4 / S::kWeights;
  const int first_quad = p.features / 4 * work.rank >> p.split_log2;
  const int quads = (p.features / 4 * (work.rank + 1) >> p.split_log2) - first_quad;
  const int quad = threadIdx.x & ((1 << p.quads_log2) - 1);
  const int feature = 4 * (first_quad + quad);
  const int32_t column = work.first_feature + feature;
  if (quad >= quads || column >= p.N) return;
  float bias[S::kWeights][4];
#pragma unroll
  for (int j = 0; j < S::kWeights; ++j) {
    const float2 low = unpack<T>(shared.bias[j][feature / 2]);
    const float2 high = unpack<T>(shared.bias[j][feature / 2 + 1]);
    bias[j][0] = low.x, bias[j][1] = low.y, bias[j][2] = high.x, bias[j][3] = high.y;
  }
  const int apart = kThreads >> p.quads_log2;  // tokens of a thread
  for (int first = threadIdx.x >> p.quads_log2; first < work.tokens; first += kInHand * apart) {
    float values[S::kWeights][kInHand][4];
    for (int rank = 0; rank < p.split; rank += kRanksAtOnce) {
      float4 parts[kRanksAtOnce][S::kWeights][kInHand];
#pragma unroll
      for (int r = 0; r < kRanksAtOnce; ++r) {
        if (rank + r >= p.split) break;
#pragma unroll
        for (int t = 0; t < kInHand; ++t) {
          const int token = first + t * apart;
          if (token >= work.tokens) break;
#pragma unroll
          for (int j = 0; j < S::kWeights; ++j) {
            parts[r][j][t] = hopper::load_in_cluster(
                reinterpret_cast<const float4*>(&shared.sums[j][token][feature]), rank + r);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRanksAtOnce; ++r) {
        if (rank + r >= p.split) break;
#pragma unroll
        for (int t = 0; t < kInHand; ++t) {
#pragma unroll
          for (int j = 0; j < S::kWeights; ++j) {
            const float4& part = parts[r][j][t];
            const float four[] = {part.x, part.y, part.z, part.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              values[j][t][i] = rank + r == 0 ? four[i] : values[j][t][i] + four[i];
            }
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < S::kWeights; ++j) {
#pragma unroll
      for (int t = 0; t < kInHand; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[j][t][i] += bias[j][i];
        const int token = first + t * apart;
        if (p.preact[j] == nullptr || token >= work.tokens) continue;
        const int64_t row = work.first_token + token;
        store_four<T>(static_cast<T*>(p.preact[j]) + row * p.N, column, values[j][t]);
      }
    }
    with_activation(p.activation, [&](auto activation) {
#pragma unroll
      for (int t = 0; t < kInHand; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          values[0][t][i] = apply<decltype(activation)::value>(values[0][t][i]);
          if constexpr (S::kWeights == 2) values[0][t][i] *= values[1][t][i];
        }
      }
    });
#pragma unroll
    for (int t = 0; t < kInHand; ++t) {
      const int token = first + t * apart;
      if (token >= work.tokens) break;
      const int64_t row = work.first_token + token;
      store_four<T>(static_cast<T*>(p.out) + row * p.out_stride, column, values[0][t]);
    }
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
#pragma unroll
    for (int i = 0; i < S::kWeights; ++i) hopper::prefetch_tensor_map(p.w[i]);
    hopper::prefetch_tensor_map(p.x);
  }
  if (!p.x_is_under_way) hopper::wait_for_previous_kernel();
  if (produces) {
    __syncwarp();
    if (hopper::elect_one()) begin_producing(shared, p, work);
  } else if (threadIdx.x < kRows / 2) {
    const int weight = threadIdx.x / (S::kFeatures / 2), pair = threadIdx.x % (S::kFeatures / 2);
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
