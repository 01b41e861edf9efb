// D[M, N] = A[M, K] B[N, K]^T for 16-bit A, B, D with fp32 sums: the plain GEMM, persistent and
// warp-specialised. The main loop that the other matrix families stand on.
//
// A CTA is three warp groups:
// - Group 0, producer. One lane waits for a slot of the ring to be empty, then issues the TMA loads
//   of the next 64-deep K block into it. Signals: the slot's full barrier (bytes).
// - Groups 1 and 2, consumers. They wait for full, run wgmma on the slot, and arrive on its empty
//   barrier once the products have completed. Then they round the sums into staging buffers and one
//   thread stores them by TMA while the next tile's products run.
// Cooperative: both consumers work on one tile, each on half of its rows. Ping-pong: each has a
// tile of its own and they take turns at the tensor cores, so that one's epilogue hides under the
// other's main loop; the turns are handed over by the named barriers kTurn. With a cluster of 2
// along M the CTAs share their B tile: each loads half of it and multicasts it to both, so a slot
// is empty only when the consumers of both CTAs have released it.
//
// What becomes of a tile's sums is the kernel's Epilogue: PlainEpilogue below rounds and stores
// them. Another has the same members.
#pragma once

#include "config/gemm.h"
#include "hopper/cluster.cuh"
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

// One of kGemmKernels for one element type.
template <class T_, int kKernel>
struct Shape {
  using T = T_;
  static constexpr GemmKernel kConfig = kGemmKernels[kKernel];
  static constexpr int kTileM = kConfig.tile_m, kTileN = kConfig.tile_n;
  static constexpr int kStages = kConfig.stages, kCluster = kConfig.cluster_m;
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
  T staging[kConsumers][2][kStoreTile * kStoreTile];
  typename S::Ring ring;
  typename Epilogue::Shared epilogue;
};

struct Params {
  CUtensorMap a;  // [M, K], box kTileM x 64, 128-byte swizzle
  CUtensorMap b;  // [N, K], box kTileN / kCluster x 64, 128-byte swizzle
  CUtensorMap d;  // [M, N], box 64 x 64, 128-byte swizzle
  TileOrder order;
  int k_blocks;  // ceil(K / 64), at least 1: loads past K read zeros
};

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
__device__ void produce(Shared<S, Epilogue>& shared, const Params& params) {
  constexpr uint16_t kAllCtas = (1 << S::kCluster) - 1;
  constexpr int kShareN = S::kTileN / S::kCluster;  // rows of B that this CTA loads
  const int rank = S::kCluster > 1 ? hopper::cluster_cta_rank() : 0;
  typename S::Position position;
  auto tiles = TileSchedule::of_cta(blockIdx.x, gridDim.x, params.order.tiles());
  for (; tiles.has_tile(); tiles.next()) {
    const TileCoordinates tile = params.order.at(tiles.tile());
    const int m = tile.m_tile * S::kTileM, n = tile.n_tile * S::kTileN + rank * kShareN;
    for (int k = 0; k < params.k_blocks; ++k, position.advance()) {
      hopper::Barrier& full = shared.ring.produce(position, S::kLoadBytes);
      hopper::tma_load(shared.a[position.slot], params.a, full, hopper::L2Hint::kNormal, k * kTileK,
                       m);
      auto* b = shared.b[position.slot] + rank * kShareN * kTileK;
      if constexpr (S::kCluster > 1) {
        hopper::tma_load_multicast(b, params.b, full, hopper::L2Hint::kNormal, kAllCtas, k * kTileK,
                                   n);
      } else {
        hopper::tma_load(b, params.b, full, hopper::L2Hint::kNormal, k * kTileK, n);
      }
    }
  }
}

// ---- consumers ---------------------------------------------------------------------------------
template <class S>
using Sums = float[S::kBlocksM][S::kTileN / 2];

// Descriptors of a consumer's operands in slot 0.
struct SlotDescriptors {
  uint64_t a, b;
};

// One K block of the tile: reads the slot, adds to the sums. `add` false starts them.
template <class S>
__device__ inline void multiply(Sums<S>& sums, const SlotDescriptors& first_slot, int slot,
                                bool add) {
  using Product = hopper::Wgmma<typename S::T, S::kTileN, hopper::Major::kK, hopper::Major::kK>;
  constexpr uint32_t kStep = hopper::kDescriptorStep<hopper::Major::kK>;
  // Descriptors count in 16 bytes.
  constexpr uint32_t kRow = kTileK * sizeof(typename S::T) / 16;
  const uint64_t a = hopper::moved(first_slot.a, slot * (S::kTileM * kRow));
  const uint64_t b = hopper::moved(first_slot.b, slot * (S::kTileN * kRow));
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {
#pragma unroll
    for (int block = 0; block < S::kBlocksM; ++block) {
      Product::multiply(sums[block], hopper::moved(a, block * (64 * kRow) + k * kStep),
                        hopper::moved(b, k * kStep), add || k > 0);
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

// Rounds the sums and stores them.
struct PlainEpilogue {
  struct Params {};
  struct Shared {
    __device__ void init() {}
  };
  static constexpr bool kHasHelpers = false;

  __device__ static void start(const Params&) {}

  // A consumer's side: before a tile's products, after them, after the last tile.
  template <class S>
  struct Consumer {
    gemm::Shared<S, PlainEpilogue>& shared;
    const gemm::Params& params;
    const PlainEpilogue::Params& own_params;
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

template <class S, class Epilogue>
__device__ void consume(Shared<S, Epilogue>& shared, const Params& params,
                        const typename Epilogue::Params& epilogue_params, int consumer) {
  constexpr int kBoth = kConsumers * hopper::kWarpGroupThreads;
  const NamedBarrier my_turn = hopper::numbered(NamedBarrier::kTurn, consumer);
  const NamedBarrier its_turn = hopper::numbered(NamedBarrier::kTurn, 1 - consumer);
  const SlotDescriptors first_slot{
      hopper::descriptor<hopper::Major::kK>(shared.a[0] + first_row<S>(consumer) * kTileK),
      hopper::descriptor<hopper::Major::kK>(shared.b[0])};
  const uint32_t thread = hopper::thread_of_group();
  const int32_t k_blocks = params.k_blocks;
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
      multiply<S>(sums, first_slot, position.slot, k > 0);
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
  Epilogue::start(epilogue);
  extern __shared__ char unaligned[];
  const uint32_t base = hopper::shared_address(unaligned);
  constexpr uint32_t kAtom = hopper::kSwizzleAtomBytes;
  auto& shared =
      *reinterpret_cast<Shared<S, Epilogue>*>(unaligned + (kAtom - base % kAtom) % kAtom);
  if (hopper::warp_index() == 0) {
    shared.ring.init_by_warp();
    hopper::fence_barrier_init();
  } else if (threadIdx.x == 32) {
    shared.epilogue.init();
    hopper::fence_barrier_init();
  } else if (threadIdx.x == 64) {
    hopper::prefetch_tensor_map(params.a);
    hopper::prefetch_tensor_map(params.b);
    hopper::prefetch_tensor_map(params.d);
  }
  // All barriers exist, here and in the other CTA, before anyone arrives on them.
  if constexpr (S::kCluster > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }
  const int group = hopper::warp_group_index();
  if (group == 0) {
    hopper::give_registers<GemmKernel::kProducerRegisters>();
    const int warp = hopper::warp_index();
    if (warp == 0 && hopper::elect_one()) produce(shared, params);
    if constexpr (Epilogue::kHasHelpers) {
      if (warp >= 2) Epilogue::template help<S>(shared, params, epilogue, warp - 2);
    }
  } else {
    hopper::take_registers<GemmKernel::kConsumerRegisters>();
    consume(shared, params, epilogue, group - 1);
  }
  // The other CTA may still arrive on this one's barriers.
  if constexpr (S::kCluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::gemm
