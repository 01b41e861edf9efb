// What the parts of the candidate attention kernel share: its shared memory, parameters and named
// barriers.
#pragma once

#include <cuda.h>  // CUtensorMap

#include "config/candidate_attention.h"
#include "config/fast_divisor.h"
#include "hopper/mbarrier.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/swizzle.cuh"
#include "hopper/tma.cuh"
#include "hopper/warp_group.cuh"
#include "kernels/candidate_attention/query_tiles.cuh"

namespace ikbo::attention {

inline constexpr int kConsumerRows = AttentionKernel::kConsumerRows;
inline constexpr int kGroupThreads = hopper::kWarpGroupThreads;
inline constexpr int kWarpRows = kConsumerRows / 4;
inline constexpr int kFewRows = 8;
inline constexpr int kBlock = 64;  // elements of a head that stand side by side in shared memory

// Named barriers. Not __syncthreads for the set-up: consumers and producers would have to meet at
// one place, which costs launches of 14 to 32 us 1 %.
enum class NamedBarrier {
  kSetUp = 1,  // for consumers: mbarriers are set up. Producers arrive
  kProducers,  // the same among producers
  kTurn,       // one a consumer: its turn at the tensor cores
};

// The readers of a tile: the warp that loads q, the threads that load k and v, four warps of each
// consumer.
template <int kConsumers>
using TilesOf = TileRing<2, 1 + 2 + kConsumers * 4>;

// One of kAttentionKernels for one element type.
template <class T_, int kKernel>
struct Shape {
  using T = T_;
  static constexpr int kIndex = kKernel;
  static constexpr AttentionKernel kConfig = kAttentionKernels[kKernel];
  static constexpr int kHeadQk = kConfig.head_qk, kHeadV = kConfig.head_v;
  static constexpr int kTileM = kConfig.tile_m();
  static constexpr int kTileN = kConfig.tile_n, kStages = kConfig.stages;
  static constexpr int kConsumers = kConfig.consumers;
  using Tiles = TilesOf<kConsumers>;
  static constexpr bool kStagesResults = kConfig.stages_results;
  static constexpr bool kQInRegisters = kConfig.q_in_registers;
  // Each warp gives back its rows of a slot of q, or one thread all.
  static constexpr bool kWarpsReleaseQ = kStagesResults || kQInRegisters;
  using RingQ = hopper::Pipeline<kConfig.q_slots, kWarpsReleaseQ ? 4 : 1>;
  using Ring = hopper::Pipeline<kStages, kConsumers>;
};

template <class S>
struct alignas(hopper::kSwizzleAtomBytes) Shared {
  using T = typename S::T;
  // Blocks of 64 elements of the head, rows of 128 bytes.
  T q[S::kConsumers][S::kConfig.q_slots][S::kHeadQk / kBlock][kConsumerRows * kBlock];
  T k[S::kStages][S::kHeadQk / kBlock][S::kTileN * kBlock];
  T v[S::kStages][S::kHeadV / kBlock][S::kTileN * kBlock];
  typename S::RingQ ring_q[S::kConsumers];
  typename S::Ring ring_k;
  typename S::Ring ring_v;
  typename S::Tiles tiles;
};

// Where in a consumer's slot of q a lane's row is that it hands to load_tiles or store_tiles, for
// its warp's sixteen rows and the head's first 16 elements; for the next ones it is at ^ 32. Made
// anew each time: addresses kept through the steps would take registers that these need.
__device__ inline uint32_t row_in_slot() {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kGroupThreads / 32 * kWarpRows + lane % 16;
  uint32_t at = hopper::swizzle_128(row, lane / 16 * 16);
  asm volatile("" : "+r"(at));
  return at;
}

struct Params {
  CUtensorMap q;           // [B S, H, D], box rows_together x 1 x 64
  CUtensorMap k;           // [U or 1, rows, Hk, D], box 1 x kTileN x 1 x 64
  CUtensorMap v;           // [U or 1, rows, Hk, Dv], as k
  CUtensorMap v_few_rows;  // the same, box 1 x kFewRows x 1 x 64
  CUtensorMap v_row;       // the same, box 1 x 1 x 1 x 64
  CUtensorMap results;     // [B S, H, Dv], box kWarpRows x 1 x 64
  UserRuns runs;
  const int32_t* cand_to_user;  // [B]
  void* out;                    // [B S, H, Dv]
  float* lse;                   // [B, H, S] or null
  int32_t Dv;
  FastDivisor heads_per_kv;  // H / Hk
  hopper::L2Hint keys_hint;
  int32_t rows_together;  // of a consumer's 64, how many lie side by side in the batch
  FastDivisor parts;      // of the keys of each tile
  int32_t most_parts;     // of all tiles, where they are cut
  uint32_t* ticket;       // the next one, or null
  Guess guess;
  float scale;
  void* kept;  // KeptResults, one a part

  __device__ bool is_split() const { return parts.divisor() > 1; }
};

}  // namespace ikbo::attention
