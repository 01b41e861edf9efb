// D[M, N] = A[M, K] B[N, K]^T for 16-bit A, B, D with fp32 sums: the plain GEMM, persistent and
// warp-specialised. The main loop that the other matrix families stand on.
//
// A CTA is three warp groups:
// - Group 0, producer. One lane waits for a slot of the ring to be empty, then issues the TMA loads
//   of the next 64-deep K block into it. Signals: the slot's full barrier (bytes). The first two
//   blocks are on their way before the CTA has met.
// - Groups 1 and 2, consumers. They wait for full, run wgmma on the slot, and arrive on its empty
//   barrier once the products have completed. Then they round the sums into staging buffers and one
//   thread stores them by TMA while the next tile's products run.
// Cooperative: both consumers work on one tile, each on half of its rows. Ping-pong: each has a
// tile of its own and they take turns at the tensor cores, so that one's epilogue hides under the
// other's main loop; the turns are handed over by the named barriers kTurn. With a cluster of 2
// along M the CTAs share their B tile: each loads half of it and multicasts it to both, so a slot
// is empty only when the consumers of both CTAs have released it.
//
// What becomes of a tile's sums is the kernel's Epilogue: RoundEpilogue below rounds and stores
// them. Another has the same members, some of which say what the operands are:
// - kMajorB: B is [N, K] as a Linear's weight is in its forward (kK), or [K, N] (kMn) as it is in
//   its backward.
// - kWeights = 2: the B tile is two halves side by side, each of a matrix of its own (b and the
//   epilogue's b_up): one wgmma reads both, so it costs what a plain one does, and sums kTileN / 2
//   columns apart are in the same thread.
// - kTerms = 2: D is the sum of two products of the same K, whose operands (a and b, then the
//   epilogue's a_more and b_more) follow each other along it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "config/gemm.h"
#include "hopper/cluster.cuh"
#include "hopper/dependent_launch.cuh"
#include "hopper/fragments.cuh"
#include "hopper/mbarrier.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/swizzle.cuh"
#include "hopper/tma.cuh"
#include "hopper/warp_group.cuh"
#include "hopper/wgmma.cuh"
#include "kernels/numeric.cuh"

namespace ikbo::gemm {

inline constexpr int kTileK = GemmKernel::kTileK;  // one 128-byte swizzled row
inline constexpr int kStoreTile = 64;              // rows and columns of a staging buffer
inline constexpr int kConsumers = GemmKernel::kConsumers;

// Named barriers (0 is __syncthreads).
enum class NamedBarrier {
  kTurn = 1,     // + consumer: its turn at the tensor cores
  kStaging = 3,  // + consumer: its own 128 threads, around its staging buffers
  kStaged = 5,   // + 2 * consumer + buffer: from the consumer to its helper warp (JoinEpilogue)
};

// One of kGemmKernels for one element type. More staging buffers a consumer take the place of
// stages.
template <class T_, int kKernel, int kBuffers_ = GemmKernel::kStagingBuffers>
struct Shape {
  using T = T_;
  static constexpr GemmKernel kConfig = kGemmKernels[kKernel];
  static constexpr int kTileM = kConfig.tile_m, kTileN = kConfig.tile_n;
  static constexpr int kBuffers = kBuffers_, kCluster = kConfig.cluster_m;
  static constexpr int kStages = kConfig.stages_beside(kBuffers);
  static constexpr bool kPingPong = kConfig.schedule == GemmSchedule::kPingPong;
  static constexpr int kConsumerM = kConfig.rows_per_consumer();
  static constexpr int kBlocksM = kConsumerM / 64;  // of wgmma's 64 rows
  static constexpr int kLoadBytes = kConfig.stage_bytes();
  // A slot is read by one consumer in ping-pong, by both in cooperation.
  using Ring = hopper::Pipeline<kStages, kPingPong ? 1 : kConsumers, kCluster>;
  using Position = typename Ring::Position;
};

template <class S, class Epilogue>
struct alignas(hopper::kSwizzleAtomBytes) Shared {
  using T = typename S::T;
  T a[S::kStages][S::kTileM * kTileK];
  T b[S::kStages][S::kTileN * kTileK];
  T staging[kConsumers][S::kBuffers][kStoreTile * kStoreTile];
  typename S::Ring ring;
  typename Epilogue::Shared epilogue;
};

// What of its operands the kernel ahead on the stream, which may still be running, computes.
// Everything else was there before that one.
enum class Ahead {
  kAnything,  // all threads wait for it before they touch memory
  kA,         // it is waited for before A's first load: the first blocks of B are on their way then
  kPart,      // the epilogue waits for it, before it reads what it joins
};

struct Params {
  CUtensorMap a;  // [M, K], box kTileM x 64, 128-byte swizzle
  CUtensorMap b;  // [N, K], box kPartN x 64, 128-byte swizzle; or [K, N], box 64 x 64
  CUtensorMap d;  // [M, N], box 64 x 64, 128-byte swizzle
  TileOrder order;
  int k_blocks;  // ceil(K / 64) of each term, at least 1: loads past K read zeros
  Ahead ahead;
};

// B tiles are loaded in parts: one a CTA of the cluster, or one a weight. Those of [K, N] are 64
// columns wide.
template <class S, class Epilogue>
inline constexpr int kPartN =
    Epilogue::kMajorB == hopper::Major::kMn ? 64
                                            : S::kTileN / std::max(S::kCluster, Epilogue::kWeights);

// The tiles of a consumer, in its order.
template <class S>
__device__ inline TileSchedule tiles_of_consumer(const TileOrder& order, int consumer) {
  return S::kPingPong ? TileSchedule::of_consumer(blockIdx.x, consumer, gridDim.x, order.tiles())
                      : TileSchedule::of_cta(blockIdx.x, gridDim.x, order.tiles());
}

// The first row of a consumer in its tile.
template <class S>
__device__ constexpr int first_row(int consumer) {
  return S::kPingPong ? 0 : consumer * S::kConsumerM;
}

// ---- producer ----------------------------------------------------------------------------------
template <class S, class Epilogue>
__device__ inline void load_a(Shared<S, Epilogue>& shared, const CUtensorMap& a,
                              const TileCoordinates& tile, int k, int slot) {
  hopper::tma_load(shared.a[slot], a, shared.ring.full[slot], hopper::L2Hint::kNormal, k * kTileK,
                   tile.m_tile * S::kTileM);
}

// The parts of B that this CTA loads.
template <class S, class Epilogue>
__device__ inline void load_b(Shared<S, Epilogue>& shared, const CUtensorMap& b,
                              const typename Epilogue::Params& epilogue,
                              const TileCoordinates& tile, int k, int slot) {
  constexpr uint16_t kAllCtas = (1 << S::kCluster) - 1;
  constexpr int kPart = kPartN<S, Epilogue>;
  const int rank = S::kCluster > 1 ? hopper::cluster_cta_rank() : 0;
  const auto load = [&](int part, const CUtensorMap& map, int x, int y) {
    auto* to = shared.b[slot] + part * kPart * kTileK;
    hopper::Barrier& full = shared.ring.full[slot];
    if constexpr (S::kCluster > 1) {
      hopper::tma_load_multicast(to, map, full, hopper::L2Hint::kNormal, kAllCtas, x, y);
    } else {
      hopper::tma_load(to, map, full, hopper::L2Hint::kNormal, x, y);
    }
  };
  if constexpr (Epilogue::kMajorB == hopper::Major::kMn) {
    constexpr int kOwn = S::kTileN / kPart / S::kCluster;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int part = rank * kOwn + i;
      load(part, b, tile.n_tile * S::kTileN + part * kPart, k * kTileK);
    }
  } else if constexpr (Epilogue::kWeights == 1) {
    load(rank, b, k * kTileK, tile.n_tile * S::kTileN + rank * kPart);
  } else {
    if (rank == 0) load(0, b, k * kTileK, tile.n_tile * kPart);
    if (S::kCluster == 1 || rank == 1) load(1, epilogue.b_up, k * kTileK, tile.n_tile * kPart);
  }
}

// One lane, in two steps that share no variables: only where a lane is elected right before does
// the compiler know that what it computes needs no loop over lanes to reach the copy engine.

// Blocks of the first tile that are on their way before the CTA meets. No more than two: the copy
// engine takes in 55 to 80 bytes a clock, and whoever asks for more waits for it, and the CTA for
// him.
template <class S>
__device__ inline int blocks_ahead(const Params& params) {
  return min(2, params.k_blocks);
}

// Loads them, A as far as it is there. Needs the ring's barriers only, those of the other
// CTA included.
template <class S, class Epilogue>
__device__ void begin_producing(Shared<S, Epilogue>& shared, const Params& params,
                                const typename Epilogue::Params& epilogue) {
  const TileCoordinates tile = params.order.at(blockIdx.x);
  for (int k = 0; k < blocks_ahead<S>(params); ++k) {
    hopper::arrive_expect_bytes(shared.ring.full[k], S::kLoadBytes);
    if (params.ahead != Ahead::kA) load_a<S>(shared, params.a, tile, k, k);
    load_b<S>(shared, params.b, epilogue, tile, k, k);
  }
}

template <class S, class Epilogue>
__device__ void produce(Shared<S, Epilogue>& shared, const Params& params,
                        const typename Epilogue::Params& epilogue) {
  auto tiles = TileSchedule::of_cta(blockIdx.x, gridDim.x, params.order.tiles());
  int first_k = blocks_ahead<S>(params);
  if (params.ahead == Ahead::kA) {
    hopper::wait_for_previous_kernel();
    const TileCoordinates tile = params.order.at(tiles.tile());
    for (int k = 0; k < first_k; ++k) load_a<S>(shared, params.a, tile, k, k);
  }
  typename S::Position position;
  position.advance(first_k);
  for (; tiles.has_tile(); tiles.next()) {
    const TileCoordinates tile = params.order.at(tiles.tile());
    for (int k = first_k; k < params.k_blocks; ++k, position.advance()) {
      shared.ring.produce(position, S::kLoadBytes);
      load_a<S>(shared, params.a, tile, k, position.slot);
      load_b<S>(shared, params.b, epilogue, tile, k, position.slot);
    }
    if constexpr (Epilogue::kTerms == 2) {
      for (int k = 0; k < params.k_blocks; ++k, position.advance()) {
        shared.ring.produce(position, S::kLoadBytes);
        load_a<S>(shared, epilogue.a_more, tile, k, position.slot);
        load_b<S>(shared, epilogue.b_more, epilogue, tile, k, position.slot);
      }
    }
    first_k = 0;
  }
  hopper::wait_for_previous_kernel();
  hopper::allow_next_kernel();  // its start overlaps with the last products and epilogues
}

// ---- consumers ---------------------------------------------------------------------------------
template <class S>
using Sums = float[S::kBlocksM][S::kTileN / 2];

// Descriptors of a consumer's operands in slot 0.
struct SlotDescriptors {
  uint64_t a, b;
};

// One K block of the tile: reads the slot, adds to the sums. `add` false starts them.
template <class S, hopper::Major kMajorB>
__device__ inline void multiply(Sums<S>& sums, const SlotDescriptors& first_slot, int slot,
                                bool add) {
  using Product = hopper::Wgmma<typename S::T, S::kTileN, hopper::Major::kK, kMajorB>;
  constexpr uint32_t kStepA = hopper::kDescriptorStep<hopper::Major::kK>;
  constexpr uint32_t kStepB = hopper::kDescriptorStep<kMajorB>;
  // Descriptors count in 16 bytes.
  constexpr uint32_t kRow = kTileK * sizeof(typename S::T) / 16;
  const uint64_t a = hopper::moved(first_slot.a, slot * (S::kTileM * kRow));
  const uint64_t b = hopper::moved(first_slot.b, slot * (S::kTileN * kRow));
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {
#pragma unroll
    for (int block = 0; block < S::kBlocksM; ++block) {
      Product::multiply(sums[block], hopper::moved(a, block * (64 * kRow) + k * kStepA),
                        hopper::moved(b, k * kStepB), add || k > 0);
    }
  }
}

// The address that this lane passes to stmatrix or ldmatrix for 16 columns of a staging buffer,
// which has the 128-byte swizzle that the store's map undoes. They take four 8 x 8 tiles: rows 0-7
// and 8-15 of two neighbouring column groups; lane l points to row l % 8 of tile l / 8.
template <class T>
__device__ inline char* staged_tiles(T* staging, int column) {
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x % hopper::kWarpGroupThreads / 32 * 16;
  const int row = warp_row + lane / 8 % 2 * 8 + lane % 8;
  const uint32_t byte = (column + lane / 16 * 8) * sizeof(T);
  return reinterpret_cast<char*>(staging) + hopper::swizzle_128(row, byte);
}

// Rounds a 64 x 64 block of sums, starting at column `first` of the thread's row of them, into a
// staging buffer.
template <class T, int kCount>
__device__ inline void stage_block(T* staging, const float (&sums)[kCount], int first) {
#pragma unroll
  for (int column = 0; column < kStoreTile; column += 16) {
    const float* d = &sums[(first + column) / 2];
    const uint32_t tiles[4] = {pack<T>(d[0], d[1]), pack<T>(d[2], d[3]), pack<T>(d[4], d[5]),
                               pack<T>(d[6], d[7])};
    hopper::store_tiles(staged_tiles(staging, column), tiles);
  }
}

// What most epilogues have in common.
struct BaseEpilogue {
  static constexpr bool kHasHelpers = false;
  static constexpr int kBuffers = GemmKernel::kStagingBuffers;
  static constexpr int kWeights = 1;
  static constexpr int kTerms = 1;
  static constexpr hopper::Major kMajorB = hopper::Major::kK;
};

struct OneTerm {};
struct TwoTerms {
  CUtensorMap a_more, b_more;  // as the maps of a and b
};

// Rounds the sums and stores them.
template <int kTerms_, hopper::Major kMajorB_>
struct RoundEpilogue : BaseEpilogue {
  static constexpr int kTerms = kTerms_;
  static constexpr hopper::Major kMajorB = kMajorB_;
  using Params = std::conditional_t<kTerms == 2, TwoTerms, OneTerm>;
  struct Shared {
    __device__ void init() {}
  };

  // A consumer's side: before a tile's products, after them, after the last tile.
  template <class S>
  struct Consumer {
    gemm::Shared<S, RoundEpilogue>& shared;
    const gemm::Params& params;
    const RoundEpilogue::Params& own_params;
    const int consumer;

    __device__ void begin(int32_t) {}

    __device__ void finish(Sums<S>& sums, int32_t index) {
      const TileCoordinates tile = params.order.at(index);
      store(sums, tile.m_tile * S::kTileM + first_row<S>(consumer), tile.n_tile * S::kTileN);
    }

    __device__ void end() {
      if (threadIdx.x % hopper::kWarpGroupThreads == 0) hopper::tma_store_wait_read<0>();
    }

    __device__ void store(const Sums<S>& sums, int m, int n) {
      const bool stores = threadIdx.x % hopper::kWarpGroupThreads == 0;
      const NamedBarrier mine = hopper::numbered(NamedBarrier::kStaging, consumer);
      int buffer = 0;
#pragma unroll
      for (int block = 0; block < S::kBlocksM; ++block) {
#pragma unroll
        for (int column = 0; column < S::kTileN; column += kStoreTile) {
          auto* staging = shared.staging[consumer][buffer];
          if (stores) hopper::tma_store_wait_read<1>();  // all but the latest: this buffer is free
          hopper::barrier_wait(mine, hopper::kWarpGroupThreads);
          stage_block<typename S::T>(staging, sums[block], column);
          hopper::fence_shared_for_async();
          hopper::barrier_wait(mine, hopper::kWarpGroupThreads);
          if (stores) {
            hopper::tma_store(params.d, staging, hopper::L2Hint::kEvictFirst, n + column,
                              m + 64 * block);
            hopper::tma_store_commit();
          }
          buffer ^= 1;
        }
      }
    }
  };
};

using PlainEpilogue = RoundEpilogue<1, hopper::Major::kK>;
// The gradient of an input of two Linears: dG Wg + dU Wu.
using InputGradEpilogue = RoundEpilogue<2, hopper::Major::kMn>;

template <class S, class Epilogue>
__device__ void consume(Shared<S, Epilogue>& shared, const Params& params,
                        const typename Epilogue::Params& epilogue_params, int consumer) {
  constexpr int kBoth = kConsumers * hopper::kWarpGroupThreads;
  const NamedBarrier my_turn = hopper::numbered(NamedBarrier::kTurn, consumer);
  const NamedBarrier its_turn = hopper::numbered(NamedBarrier::kTurn, 1 - consumer);
  const SlotDescriptors first_slot{
      hopper::descriptor<hopper::Major::kK>(shared.a[0] + first_row<S>(consumer) * kTileK),
      hopper::descriptor<Epilogue::kMajorB>(shared.b[0], 64 * kTileK * sizeof(typename S::T))};
  const uint32_t thread = hopper::thread_of_group();
  const int32_t k_blocks = Epilogue::kTerms * params.k_blocks;
  typename S::Position position;
  typename Epilogue::template Consumer<S> epilogue{shared, params, epilogue_params, consumer};
  auto tiles = tiles_of_consumer<S>(params.order, consumer);
  if (S::kPingPong && consumer == 1) {
    hopper::barrier_arrive(its_turn, kBoth);  // consumer 0 has the first turn
    position.advance(k_blocks);
  }
  for (; tiles.has_tile(); tiles.next()) {
    epilogue.begin(tiles.tile());
    if constexpr (S::kPingPong) hopper::barrier_wait(my_turn, kBoth);
    Sums<S> sums;
    bool is_there = false;
    for (int k = 0; k < k_blocks; ++k) {
      if (!is_there) shared.ring.wait_full(position);
      hopper::wgmma_fence();
      multiply<S, Epilogue::kMajorB>(sums, first_slot, position.slot, k > 0);
      hopper::wgmma_commit();
      position.advance();
      is_there = shared.ring.is_full(position);  // after the last block nobody asks
      hopper::wgmma_wait<1>();                   // the products of the block before have read it
      if (k > 0) shared.ring.release(position.slot_before(2), thread);
    }
    const int last_slot = position.slot_before(1);
    // The tensor cores have all of this tile's work: the other consumer's may queue behind it.
    if constexpr (S::kPingPong) {
      hopper::barrier_arrive(its_turn, kBoth);
      position.advance(k_blocks);  // the other's tile
    }
    hopper::wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < S::kBlocksM; ++block) hopper::fence_registers(sums[block]);
    shared.ring.release(last_slot);
    epilogue.finish(sums, tiles.tile());
  }
  // A turn was handed on after the last tile as after every other: whoever would be next takes it,
  // so that no barrier is left half full.
  const int mine =
      (params.order.tiles() - static_cast<int>(blockIdx.x) + gridDim.x - 1) / gridDim.x;
  if (S::kPingPong && mine % 2 == consumer) hopper::barrier_wait(my_turn, kBoth);
  epilogue.end();
}

template <class S, class Epilogue>
__global__ void __launch_bounds__(GemmKernel::kThreads, 1)
    gemm_sm90(const __grid_constant__ Params params,
              const __grid_constant__ typename Epilogue::Params epilogue) {
  extern __shared__ char unaligned[];
  const uint32_t base = hopper::shared_address(unaligned);
  constexpr uint32_t kAtom = hopper::kSwizzleAtomBytes;
  auto& shared =
      *reinterpret_cast<Shared<S, Epilogue>*>(unaligned + (kAtom - base % kAtom) % kAtom);
  const int warp = hopper::warp_index();
  if (warp == 0) {
    shared.ring.init_by_warp();
    hopper::fence_barrier_init();
    __syncwarp();
  } else if (threadIdx.x == 32) {
    shared.epilogue.init();
    hopper::fence_barrier_init();
  } else if (threadIdx.x == 64) {
    hopper::prefetch_tensor_map(params.a);
    hopper::prefetch_tensor_map(params.b);
    hopper::prefetch_tensor_map(params.d);
    if constexpr (Epilogue::kWeights == 2) hopper::prefetch_tensor_map(epilogue.b_up);
    if constexpr (Epilogue::kTerms == 2) {
      hopper::prefetch_tensor_map(epilogue.a_more);
      hopper::prefetch_tensor_map(epilogue.b_more);
    }
  }
  if (params.ahead == Ahead::kAnything) hopper::wait_for_previous_kernel();
  // Loads for both CTAs of a pair need the barriers of both.
  if (S::kCluster == 1 && warp == 0 && hopper::elect_one()) {
    begin_producing<S>(shared, params, epilogue);
  }
  // All barriers exist, here and in the other CTA, before anyone arrives on them.
  if constexpr (S::kCluster > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }
  // The other CTA may still arrive on this one's barriers.
  const auto leave = [] {
    if constexpr (S::kCluster > 1) hopper::cluster_sync();
  };
  // The two ways don't meet again: only then does ptxas give the consumers all the registers that
  // they take.
  if (warp >= 4) {
    hopper::take_registers<GemmKernel::kConsumerRegisters>();
    consume(shared, params, epilogue, warp / 4 - 1);
    leave();
    return;
  }
  hopper::give_registers<GemmKernel::kProducerRegisters>();
  if (warp == 0 && hopper::elect_one()) {
    if (S::kCluster > 1) begin_producing<S>(shared, params, epilogue);
    produce<S>(shared, params, epilogue);
  }
  if constexpr (Epilogue::kHasHelpers) {
    if (warp >= 2) Epilogue::template help<S>(shared, params, epilogue, warp - 2);
  }
  leave();
}

}  // namespace ikbo::gemm
