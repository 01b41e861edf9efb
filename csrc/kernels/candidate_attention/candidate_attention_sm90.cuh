// out = softmax(scale * q k^T) v for the query rows of candidates over the keys of their users,
// each user's stored once. 16-bit operands, fp32 scores and sums; persistent and warp-specialised.
//
// A tile is 128 query rows of one user and head (query_tiles.cuh) and goes over the user's keys in
// blocks of kTileN. Warp groups:
// - Groups 0 and 1, consumers, 64 query rows each. Of key block j: scores = q k_j^T, and under the
//   next block's scores the weights' product with v_j; the softmax of one consumer runs under the
//   products of the other, which the named barriers kTurn keep apart.
// - Group 2. Finder, a warp: finds the CTA's tiles and hands them on. Loader of q and k: waits for
//   both consumers to have released a stage, and for each to have made its last scores of the tile
//   before it overwrites its q. Loader of v, likewise.
// Results go through a staging buffer to the output, by TMA where all 64 rows are the user's. Where
// there are too few tiles for the GPU each is cut into parts of its keys; a part's results go to
// scratch in fp32, and combine_sm90.cuh adds them up.
#pragma once

#include "config/candidate_attention.h"
#include "hopper/fragments.cuh"
#include "hopper/mbarrier.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/swizzle.cuh"
#include "hopper/tma.cuh"
#include "hopper/warp_group.cuh"
#include "hopper/wgmma.cuh"
#include "kernels/candidate_attention/query_tiles.cuh"
#include "kernels/candidate_attention/softmax.cuh"
#include "kernels/numeric.cuh"

namespace ikbo::attention {

inline constexpr int kConsumers = AttentionKernel::kConsumers;
inline constexpr int kConsumerRows = AttentionKernel::kConsumerRows;
inline constexpr int kTileM = AttentionKernel::kTileM;
inline constexpr int kGroupThreads = hopper::kWarpGroupThreads;
inline constexpr int kFewRows = 8;
inline constexpr int kBlock = 64;  // elements of a head that stand side by side in shared memory

// Named barriers (0 is __syncthreads).
enum class NamedBarrier {
  kTurn = 1,     // one a consumer: its turn at the tensor cores
  kStaging = 3,  // one a consumer: its own 128 threads, around its staging buffer
};

// One of kAttentionKernels for one element type.
template <class T_, int kKernel>
struct Shape {
  using T = T_;
  static constexpr AttentionKernel kConfig = kAttentionKernels[kKernel];
  static constexpr int kHeadQk = kConfig.head_qk, kHeadV = kConfig.head_v;
  static constexpr int kTileN = kConfig.tile_n, kStages = kConfig.stages;
  using Ring = hopper::Pipeline<kStages, kConsumers>;
};

// The readers of a tile: two loaders, four warps of each consumer.
using Tiles = TileRing<2, 2 + kConsumers * 4>;

template <class S>
struct alignas(hopper::kSwizzleAtomBytes) Shared {
  using T = typename S::T;
  // Blocks of 64 elements of the head, rows of 128 bytes.
  T q[kConsumers][S::kHeadQk / kBlock][kConsumerRows * kBlock];
  T k[S::kStages][S::kHeadQk / kBlock][S::kTileN * kBlock];
  T v[S::kStages][S::kHeadV / kBlock][S::kTileN * kBlock];
  T own_staging[S::kConfig.stages_in_q ? 0 : kConsumers][S::kHeadV / kBlock]
               [kConsumerRows * kBlock];
  typename S::Ring ring_k;
  typename S::Ring ring_v;
  hopper::Barrier q_full[kConsumers];
  hopper::Barrier q_empty[kConsumers];
  Tiles tiles;

  // Block d of a consumer's outputs.
  __device__ T* staging(int consumer, int d) {
    if constexpr (S::kConfig.stages_in_q) {
      return q[consumer][d];
    } else {
      return own_staging[consumer][d];
    }
  }
};

struct Params {
  CUtensorMap q;           // [B S, H, D], box 64 x 1 x 64
  CUtensorMap k;           // [U or 1, rows, Hk, D], box 1 x kTileN x 1 x 64
  CUtensorMap v;           // [U or 1, rows, Hk, Dv], as k
  CUtensorMap v_few_rows;  // the same, box 1 x kFewRows x 1 x 64
  CUtensorMap v_row;       // the same, box 1 x 1 x 1 x 64
  CUtensorMap out;         // [B S, H, Dv], as q
  UserRuns runs;
  const int32_t* cand_to_user;  // [B]
  void* out_rows;               // out's memory
  float* lse;                   // [B, H, S] or null
  int32_t Dv;
  int32_t heads_per_kv;  // H / Hk
  int32_t parts;         // of the keys of each tile
  float* partial_out;    // [parts, B S, H, Dv], where there are several
  float* partial_lse;    // [parts, B S, H]
  float scale;
};

// Cuts a tile's keys down to one part of them, whole key tiles.
__device__ inline void take_part(QueryTile& tile, uint32_t part, uint32_t parts, int32_t tile_n) {
  tile.part = static_cast<int32_t>(part);
  if (tile.kv_len <= 0) return;
  const uint32_t key_tiles = tile.key_tiles(tile_n);  // times kMaxParts they stay in 32 bits
  const int32_t first = static_cast<int32_t>(part * key_tiles / parts) * tile_n;
  const int32_t end = static_cast<int32_t>((part + 1) * key_tiles / parts) * tile_n;
  tile.kv_row += first;
  tile.kv_len = min(tile.kv_len, end) - first;
}

// ---- group 2 -----------------------------------------------------------------------------------
template <class S>
__device__ void find_tiles(Shared<S>& shared, const Params& params) {
  TileFinder<kTileM> finder(params.runs);
  Tiles::Position position;
  const int32_t tiles = finder.tiles();
  const int32_t parts = params.parts;
  const int32_t all = tiles * params.runs.H * parts;  // attention_decline_reason: in int32
  for (int32_t index = blockIdx.x; index < all; index += gridDim.x, position.advance()) {
    const int32_t of_all_heads = index / parts;
    QueryTile tile = finder.find(of_all_heads % tiles);
    tile.head = of_all_heads / tiles;
    if (parts > 1) take_part(tile, index % parts, parts, S::kTileN);
    if (threadIdx.x % 32 == 0) shared.tiles.write(position, tile);
  }
  QueryTile last{};
  last.head = -1;
  if (threadIdx.x % 32 == 0) shared.tiles.write(position, last);
}

template <class S>
__device__ void load_q_and_k(Shared<S>& shared, const Params& params) {
  constexpr uint32_t kQBytes = S::kConfig.q_bytes() / kConsumers;
  Tiles::Position at;
  typename S::Ring::Position position;
  uint32_t q_phase = 0;
  for (;; at.advance()) {
    const QueryTile tile = shared.tiles.read_alone(at);
    if (tile.is_last()) return;
    const int32_t blocks = tile.key_tiles(S::kTileN);
    if (blocks == 0) continue;
    const int32_t kv_head = tile.head / params.heads_per_kv;
    const auto load_q = [&](int consumer) {
      hopper::wait(shared.q_empty[consumer], q_phase ^ 1);
      hopper::arrive_expect_bytes(shared.q_full[consumer], kQBytes);
#pragma unroll
      for (int d = 0; d < S::kHeadQk / kBlock; ++d) {
        hopper::tma_load(shared.q[consumer][d], params.q, shared.q_full[consumer],
                         hopper::L2Hint::kEvictFirst, d * kBlock, tile.head,
                         tile.first_row + consumer * kConsumerRows);
      }
    };
    load_q(0);
#pragma unroll 1
    for (int32_t j = 0; j < blocks; ++j, position.advance()) {
      hopper::Barrier& full = shared.ring_k.produce(position, S::kConfig.k_bytes());
#pragma unroll
      for (int d = 0; d < S::kHeadQk / kBlock; ++d) {
        hopper::tma_load(shared.k[position.slot][d], params.k, full, hopper::L2Hint::kEvictLast,
                         d * kBlock, kv_head, tile.kv_row + j * S::kTileN, tile.kv_batch);
      }
      if (j == 0) load_q(1);
    }
    q_phase ^= 1;
  }
}

template <class S>
__device__ void load_v(Shared<S>& shared, const Params& params) {
  Tiles::Position at;
  typename S::Ring::Position position;
  for (;; at.advance()) {
    const QueryTile tile = shared.tiles.read_alone(at);
    if (tile.is_last()) return;
    const int32_t blocks = tile.key_tiles(S::kTileN);
    const int32_t kv_head = tile.head / params.heads_per_kv;
#pragma unroll 1
    for (int32_t j = 0; j < blocks; ++j, position.advance()) {
      hopper::Barrier& full = shared.ring_v.produce(position, S::kConfig.v_bytes());
      const int32_t first = j * S::kTileN, keys = tile.kv_len - first;
      const auto load = [&](const CUtensorMap& map, int32_t row_in_block, int32_t row) {
#pragma unroll
        for (int d = 0; d < S::kHeadV / kBlock; ++d) {
          hopper::tma_load(shared.v[position.slot][d] + row_in_block * kBlock, map, full,
                           hopper::L2Hint::kEvictLast, d * kBlock, kv_head, row, tile.kv_batch);
        }
      };
      // Zeros follow the last row of the tensor by themselves.
      if (keys >= S::kTileN || tile.kv_row + tile.kv_len == params.runs.L) {
        load(params.v, 0, tile.kv_row + first);
        continue;
      }
      // What follows the last key elsewhere may be NaN, which a weight of 0 doesn't remove: eight
      // rows at a time up to it, single rows, and zeros.
#pragma unroll 1
      for (int32_t row = 0; row < S::kTileN; row += kFewRows) {
        const int32_t at_row = tile.kv_row + first + row;
        if (row + kFewRows <= keys || row >= keys) {
          load(params.v_few_rows, row, row >= keys ? params.runs.L : at_row);
        } else {
#pragma unroll 1
          for (int32_t i = 0; i < kFewRows; ++i) {
            load(params.v_row, row + i, row + i < keys ? at_row + i : params.runs.L);
          }
        }
      }
    }
  }
}

// ---- consumers ---------------------------------------------------------------------------------
template <class S>
using Scores = float[S::kTileN / 2];
template <class S>
using Outputs = float[S::kHeadV / 2];
// 16-bit weights as wgmma takes A from registers: four for each 16 keys.
template <class S>
using Weights = uint32_t[S::kTileN / 16][4];

template <class S>
__device__ inline void multiply_q_k(Scores<S>& scores, uint64_t q, uint64_t k) {
  using Product = hopper::Wgmma<typename S::T, S::kTileN, hopper::Major::kK, hopper::Major::kK>;
  constexpr uint64_t kStep = hopper::kDescriptorStep<hopper::Major::kK>;
  constexpr uint64_t kQBlock = kConsumerRows * hopper::kSwizzleRowBytes / 16;
  constexpr uint64_t kKBlock = S::kTileN * hopper::kSwizzleRowBytes / 16;
#pragma unroll
  for (int d = 0; d < S::kHeadQk / 16; ++d) {
    Product::multiply(scores, q + d / 4 * kQBlock + d % 4 * kStep,
                      k + d / 4 * kKBlock + d % 4 * kStep, d > 0);
  }
}

template <class S>
__device__ inline void multiply_weights_v(Outputs<S>& outputs, const Weights<S>& weights,
                                          uint64_t v, bool add) {
  using Product = hopper::Wgmma<typename S::T, S::kHeadV, hopper::Major::kK, hopper::Major::kMn>;
#pragma unroll
  for (int key = 0; key < S::kTileN / 16; ++key) {
    Product::multiply_registers(outputs, weights[key],
                                v + key * hopper::kDescriptorStep<hopper::Major::kMn>,
                                add || key > 0);
  }
}

template <class S>
__device__ inline void round_weights(Weights<S>& weights, const Scores<S>& scores) {
#pragma unroll
  for (int i = 0; i < S::kTileN / 4; ++i) {
    weights[i / 4][i % 4] = pack<typename S::T>(scores[2 * i], scores[2 * i + 1]);
  }
}

template <class S>
__device__ inline void scale_rows(Outputs<S>& outputs, float upper, float lower) {
#pragma unroll
  for (int i = 0; i < S::kHeadV / 2; ++i) outputs[i] *= i % 4 < 2 ? upper : lower;
}

// Rounds the outputs into the staging buffer and stores those of the user's rows.
template <class S>
__device__ inline void store_outputs(Shared<S>& shared, const Params& params,
                                     const Outputs<S>& outputs, int consumer, int32_t head,
                                     int32_t first_row, int32_t rows) {
  using T = typename S::T;
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32;
  const int staged_row = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
  const NamedBarrier mine = hopper::numbered(NamedBarrier::kStaging, consumer);
  if (thread == 0) hopper::tma_store_wait_read<0>();  // of the tile before
  hopper::barrier_wait(mine, kGroupThreads);
#pragma unroll
  for (int d = 0; d < S::kHeadV; d += 16) {
    const float* const o = &outputs[d / 2];
    const uint32_t tiles[4] = {pack<T>(o[0], o[1]), pack<T>(o[2], o[3]), pack<T>(o[4], o[5]),
                               pack<T>(o[6], o[7])};
    auto* const block = reinterpret_cast<char*>(shared.staging(consumer, d / kBlock));
    const uint32_t byte = (d % kBlock + lane / 16 * 8) * sizeof(T);
    hopper::store_tiles(block + hopper::swizzle_128(staged_row, byte), tiles);
  }
  if (rows >= kConsumerRows) {
    hopper::fence_shared_for_async();
    hopper::barrier_wait(mine, kGroupThreads);
    if (thread == 0) {
#pragma unroll
      for (int d = 0; d < S::kHeadV / kBlock; ++d) {
        hopper::tma_store(params.out, shared.staging(consumer, d), hopper::L2Hint::kEvictFirst,
                          d * kBlock, head, first_row);
      }
      hopper::tma_store_commit();
    }
    return;
  }
  hopper::barrier_wait(mine, kGroupThreads);
  constexpr int kChunks = S::kHeadV / 8;  // of 16 bytes, in a row
  for (int i = thread; i < rows * kChunks; i += kGroupThreads) {
    const int row = i / kChunks, d = i % kChunks * 8;
    if (d >= params.Dv) continue;
    const auto* block = reinterpret_cast<const char*>(shared.staging(consumer, d / kBlock));
    T* const to = static_cast<T*>(params.out_rows) +
                  ((int64_t{first_row} + row) * params.runs.H + head) * params.Dv + d;
    *reinterpret_cast<uint4*>(to) =
        *reinterpret_cast<const uint4*>(block + hopper::swizzle_128(row, d % kBlock * sizeof(T)));
  }
}

// The statistics of the thread's two rows, one lane of four.
__device__ inline void store_lse(const Params& params, const float (&lse)[2], int32_t head,
                                 int32_t first_row, int32_t rows) {
  const int thread = threadIdx.x % kGroupThreads;
  if (params.lse == nullptr || thread % 4 != 0) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * i;
    if (row >= rows) continue;
    const int32_t S = params.runs.S, candidate = (first_row + row) / S;
    params.lse[(int64_t{candidate} * params.runs.H + head) * S + (first_row + row) % S] = lse[i];
  }
}

// A part's outputs and statistics, in fp32.
template <class S>
__device__ inline void store_partial(const Params& params, const Outputs<S>& outputs,
                                     const float (&lse)[2], const QueryTile& tile,
                                     int32_t first_row, int32_t rows) {
  const int thread = threadIdx.x % kGroupThreads;
  const int64_t all_rows = int64_t{params.runs.B} * params.runs.S;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * half;
    if (row >= rows) continue;
    const int64_t place = (tile.part * all_rows + first_row + row) * params.runs.H + tile.head;
    float* const out = params.partial_out + place * params.Dv;
#pragma unroll
    for (int i = 0; i < S::kHeadV / 8; ++i) {
      const int d = 8 * i + thread % 4 * 2;
      if (d >= params.Dv) continue;
      *reinterpret_cast<float2*>(out + d) = {outputs[4 * i + 2 * half],
                                             outputs[4 * i + 2 * half + 1]};
    }
    if (thread % 4 == 0) params.partial_lse[place] = lse[half];
  }
}

// A thread's row of a tile without keys, straight to the result: zeros where there is nothing to
// attend to, NaN where the user or the keys don't exist.
template <class S>
__device__ inline void store_without_keys(const Params& params, const QueryTile& tile,
                                          int32_t first_row, int32_t rows) {
  using T = typename S::T;
  const UserRuns& runs = params.runs;
  const int32_t of_group = threadIdx.x % kGroupThreads;
  if (of_group >= rows) return;
  const int64_t row = int64_t{first_row} + of_group;
  const int32_t candidate = static_cast<int32_t>(row / runs.S);
  const int32_t user = params.cand_to_user[candidate];
  const bool exists = tile.kv_len >= 0 && user >= -1 && user < runs.U;
  const float value = exists ? 0 : NAN, lse = exists ? -INFINITY : NAN;
  const int64_t place = row * runs.H + tile.head;
  if (params.parts > 1) {
    const int64_t part = tile.part * (int64_t{runs.B} * runs.S * runs.H) + place;
    for (int32_t d = 0; d < params.Dv; ++d) params.partial_out[part * params.Dv + d] = value;
    params.partial_lse[part] = lse;
    return;
  }
  const uint32_t two = pack<T>(value, value);
  auto* const to = reinterpret_cast<uint4*>(static_cast<T*>(params.out_rows) + place * params.Dv);
  for (int32_t i = 0; i < params.Dv / 8; ++i) to[i] = {two, two, two, two};
  if (params.lse == nullptr) return;
  params.lse[(int64_t{candidate} * runs.H + tile.head) * runs.S + row % runs.S] = lse;
}

template <class S>
__device__ void consume(Shared<S>& shared, const Params& params, int consumer) {
  constexpr int kBoth = kConsumers * kGroupThreads;
  constexpr uint32_t kSlotK = S::kConfig.k_bytes() / 16, kSlotV = S::kConfig.v_bytes() / 16;
  const NamedBarrier my_turn = hopper::numbered(NamedBarrier::kTurn, consumer);
  const NamedBarrier its_turn = hopper::numbered(NamedBarrier::kTurn, 1 - consumer);
  const uint64_t q = hopper::descriptor<hopper::Major::kK>(shared.q[consumer][0]);
  const uint64_t k = hopper::descriptor<hopper::Major::kK>(shared.k[0][0]);
  const uint64_t v =
      hopper::descriptor<hopper::Major::kMn>(shared.v[0][0], S::kTileN * hopper::kSwizzleRowBytes);
  const auto k_at = [&](int slot) { return k + uint32_t(slot) * kSlotK; };
  const auto v_at = [&](int slot) { return v + uint32_t(slot) * kSlotV; };

  const auto release_q = [&] {
    if (threadIdx.x % kGroupThreads == 0) hopper::arrive(shared.q_empty[consumer]);
  };

  if (consumer == 1) hopper::barrier_arrive(its_turn, kBoth);  // consumer 0 has the first turn
  Tiles::Position at;
  typename S::Ring::Position at_k, at_v;
  uint32_t q_phase = 0;
  Softmax<S::kTileN / 2> softmax(params.scale);
  for (;; at.advance()) {
    const QueryTile tile = shared.tiles.read(at);
    if (tile.is_last()) break;
    const int32_t blocks = tile.key_tiles(S::kTileN);
    const int32_t first_row = tile.first_row + consumer * kConsumerRows;
    const int32_t rows = tile.rows - consumer * kConsumerRows;
    if (blocks == 0) {
      store_without_keys<S>(params, tile, first_row, rows);
      continue;
    }
    Outputs<S> outputs;
    float lse[2];
    Scores<S> scores;
    Weights<S> weights;
    softmax.start();
    hopper::wait(shared.q_full[consumer], q_phase);
    q_phase ^= 1;
    shared.ring_k.wait_full(at_k);
    hopper::barrier_wait(my_turn, kBoth);
    hopper::wgmma_fence();
    multiply_q_k<S>(scores, q, k_at(at_k.slot));
    hopper::wgmma_commit();
    hopper::barrier_arrive(its_turn, kBoth);
    hopper::wgmma_wait<0>();
    hopper::fence_registers(scores);
    shared.ring_k.release(at_k);
    at_k.advance();
    softmax.update(scores, tile.kv_len);
    round_weights<S>(weights, scores);

    for (int32_t j = 1; j < blocks; ++j) {
      shared.ring_k.wait_full(at_k);
      hopper::barrier_wait(my_turn, kBoth);
      hopper::wgmma_fence();
      multiply_q_k<S>(scores, q, k_at(at_k.slot));
      hopper::wgmma_commit();
      shared.ring_v.wait_full(at_v);
      hopper::wgmma_fence();
      multiply_weights_v<S>(outputs, weights, v_at(at_v.slot), j > 1);
      hopper::wgmma_commit();
      hopper::barrier_arrive(its_turn, kBoth);
      hopper::wgmma_wait<1>();  // the scores
      hopper::fence_registers(scores);
      shared.ring_k.release(at_k);
      at_k.advance();
      const float2 correction = softmax.update(scores, tile.kv_len - j * S::kTileN);
      hopper::wgmma_wait<0>();
      hopper::fence_registers(outputs);
      shared.ring_v.release(at_v);
      at_v.advance();
      scale_rows<S>(outputs, correction.x, correction.y);
      round_weights<S>(weights, scores);
    }
    // q has been read for the last time.
    if (!S::kConfig.stages_in_q) release_q();
    shared.ring_v.wait_full(at_v);
    hopper::wgmma_fence();
    multiply_weights_v<S>(outputs, weights, v_at(at_v.slot), blocks > 1);
    hopper::wgmma_commit();
    float reciprocal[2];
    softmax.finish(reciprocal, lse);
    hopper::wgmma_wait<0>();
    hopper::fence_registers(outputs);
    shared.ring_v.release(at_v);
    at_v.advance();
    scale_rows<S>(outputs, reciprocal[0], reciprocal[1]);
    if (rows > 0 && params.parts > 1) {
      store_partial<S>(params, outputs, lse, tile, first_row, rows);
    } else if (rows > 0) {
      store_lse(params, lse, tile.head, first_row, rows);
      store_outputs<S>(shared, params, outputs, consumer, tile.head, first_row, rows);
    }
    if (S::kConfig.stages_in_q) {
      if (threadIdx.x % kGroupThreads == 0) hopper::tma_store_wait_read<0>();
      hopper::fence_shared_for_async();
      hopper::barrier_wait(hopper::numbered(NamedBarrier::kStaging, consumer), kGroupThreads);
      release_q();
    }
  }
  // A turn was handed on after the last scores as after all others: consumer 0 takes it.
  if (consumer == 0) hopper::barrier_wait(my_turn, kBoth);
  if (threadIdx.x % kGroupThreads == 0) hopper::tma_store_wait_read<0>();
}

template <class S>
__global__ void __launch_bounds__(AttentionKernel::kThreads, 1)
    candidate_attention_sm90(const __grid_constant__ Params params) {
  extern __shared__ char unaligned[];
  const uint32_t base = hopper::shared_address(unaligned);
  constexpr uint32_t kAtom = hopper::kSwizzleAtomBytes;
  auto& shared = *reinterpret_cast<Shared<S>*>(unaligned + (kAtom - base % kAtom) % kAtom);
  if (threadIdx.x == 0) {
    hopper::prefetch_tensor_map(params.q);
    hopper::prefetch_tensor_map(params.k);
    hopper::prefetch_tensor_map(params.v);
    shared.ring_k.init();
    shared.ring_v.init();
    for (int c = 0; c < kConsumers; ++c) {
      hopper::init(shared.q_full[c], 1);
      hopper::init(shared.q_empty[c], 1);
    }
    shared.tiles.init();
    hopper::fence_barrier_init();
  }
  __syncthreads();
  const int group = hopper::warp_group_index();
  if (group < kConsumers) {
    hopper::take_registers<AttentionKernel::kConsumerRegisters>();
    consume<S>(shared, params, group);
    return;
  }
  hopper::give_registers<AttentionKernel::kOtherRegisters>();
  const int warp = hopper::warp_index() % 4;
  if (warp == 0) {
    find_tiles(shared, params);
  } else if (warp == 1 && hopper::elect_one()) {
    load_q_and_k(shared, params);
  } else if (warp == 2 && hopper::elect_one()) {
    load_v(shared, params);
  }
}

}  // namespace ikbo::attention
