// out = softmax(scale * q k^T) v for the query rows of candidates over the keys of their users,
// each user's stored once. 16-bit operands, fp32 scores and sums; persistent and warp-specialised.
//
// A tile is kTileM query rows of one user and head (query_tiles.cuh) and goes over the user's keys
// in blocks of kTileN. Warp groups:
// - Consumers, two or three, 64 query rows each. A step multiplies q with a block of keys and, at
//   the same time, the block before's weights with its values; then come the softmax of the new
//   scores and, under it, the rest of the second product. Steps go on across tiles: the first
//   scores of a tile are made beside the last product of the one before, whose results are stored
//   in the same step. The consumers take turns at the tensor cores (kTurn), so that the softmax of
//   one runs under the products of the other.
// - The last group, one warp each (loads.cuh): find tiles, load q, load k, load v.
// Where a consumer has no rows in a tile it lets the blocks go by. Where there are too few tiles
// for the GPU each is cut into parts of its keys, which take the places of tiles; a second kernel
// adds up their results (split.cuh).
#pragma once

#include "hopper/dependent_launch.cuh"
#include "hopper/fragments.cuh"
#include "hopper/wgmma.cuh"
#include "kernels/candidate_attention/loads.cuh"
#include "kernels/candidate_attention/results.cuh"
#include "kernels/candidate_attention/softmax.cuh"
#include "kernels/candidate_attention/split.cuh"

namespace ikbo::attention {

template <class S>
using Scores = float[S::kTileN / 2];
// 16-bit weights as wgmma takes A from registers: four for each 16 keys.
template <class S>
using Weights = uint32_t[S::kTileN / 16][4];
// q likewise: four for each 16 elements of the head.
template <class S>
using Queries = uint32_t[S::kHeadQk / 16][4];

// Each warp its own 16 rows.
template <class S>
__device__ inline void load_queries(Queries<S>& queries, const typename S::T* slot) {
  constexpr int kSlotBlock = kConsumerRows * hopper::kSwizzleRowBytes;
  const auto* const bytes = reinterpret_cast<const char*>(slot);
  const uint32_t at = row_in_slot();
#pragma unroll
  for (int d = 0; d < S::kHeadQk / 16; ++d) {
    hopper::load_tiles(queries[d], bytes + d / 4 * kSlotBlock + (at ^ d % 4 * 32));
  }
}

template <class S>
__device__ inline void multiply_q_k(Scores<S>& scores, uint64_t q, uint64_t k) {
  using Product = hopper::Wgmma<typename S::T, S::kTileN, hopper::Major::kK, hopper::Major::kK>;
  constexpr uint32_t kStep = hopper::kDescriptorStep<hopper::Major::kK>;
  constexpr uint32_t kQBlock = kConsumerRows * hopper::kSwizzleRowBytes / 16;
  constexpr uint32_t kKBlock = S::kTileN * hopper::kSwizzleRowBytes / 16;
#pragma unroll
  for (int d = 0; d < S::kHeadQk / 16; ++d) {
    Product::multiply(scores, q + (d / 4 * kQBlock + d % 4 * kStep),
                      k + (d / 4 * kKBlock + d % 4 * kStep), d > 0);
  }
}

template <class S>
__device__ inline void multiply_queries_k(Scores<S>& scores, const Queries<S>& queries,
                                          uint64_t k) {
  using Product = hopper::Wgmma<typename S::T, S::kTileN, hopper::Major::kK, hopper::Major::kK>;
  constexpr uint32_t kStep = hopper::kDescriptorStep<hopper::Major::kK>;
  constexpr uint32_t kKBlock = S::kTileN * hopper::kSwizzleRowBytes / 16;
#pragma unroll
  for (int d = 0; d < S::kHeadQk / 16; ++d) {
    Product::multiply_registers(scores, queries[d], k + (d / 4 * kKBlock + d % 4 * kStep), d > 0);
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

// What steps carry on stays in uniform registers only where ptxas knows that all lanes are
// together: hence __syncwarp() where they may have been apart. Elsewhere it moves every descriptor
// of a product to a uniform register just before it.
template <class S>
__device__ void consume(Shared<S>& shared, const Params& params, int consumer) {
  constexpr int kBoth = 2 * kGroupThreads;                // one hands on, one takes
  constexpr uint32_t kSlotQ = S::kConfig.q_bytes() / 16;  // descriptors count in 16 bytes
  constexpr uint32_t kSlotK = S::kConfig.k_bytes() / 16, kSlotV = S::kConfig.v_bytes() / 16;
  const NamedBarrier my_turn = hopper::numbered(NamedBarrier::kTurn, consumer);
  // Of two without a remainder, or ptxas serialises products.
  const int next_consumer = S::kConsumers == 2 ? 1 - consumer : (consumer + 1) % S::kConsumers;
  const NamedBarrier its_turn = hopper::numbered(NamedBarrier::kTurn, next_consumer);
  const uint32_t thread = hopper::thread_of_group();
  auto& ring_q = shared.ring_q[consumer];
  const uint64_t q = hopper::descriptor<hopper::Major::kK>(shared.q[consumer][0][0]);
  const uint64_t k = hopper::descriptor<hopper::Major::kK>(shared.k[0][0]);
  const uint64_t v =
      hopper::descriptor<hopper::Major::kMn>(shared.v[0][0], S::kTileN * hopper::kSwizzleRowBytes);

  typename S::Tiles::Position at;
  typename S::RingQ::Position at_q;
  typename S::Ring::Position at_k;
  const auto has_rows = [&](const QueryTile& tile) { return tile.rows > consumer * kConsumerRows; };
  // The next tile with keys, or the last.
  const auto next_tile = [&] {
    for (;;) {
      const QueryTile tile = shared.tiles.read(at);
      at.advance();
      if (tile.is_last() || tile.kv_len > 0) return tile;
      if (!params.is_split()) {
        store_without_keys<S>(params, tile.kv_len == 0, ConsumerRows(tile, consumer));
      }
      __syncwarp();
    }
  };
  [[maybe_unused]] Queries<S> queries;
  const auto wait_q = [&] {
    ring_q.wait_full(at_q);
    if constexpr (S::kQInRegisters) {
      load_queries<S>(queries, shared.q[consumer][at_q.slot][0]);
      at_q.advance();
    }
  };
  const auto multiply_scores = [&](Scores<S>& scores) {
    const int q_slot = hopper::uniform(at_q.slot), k_slot = hopper::uniform(at_k.slot);
    hopper::barrier_wait(my_turn, kBoth);
    hopper::wgmma_fence();
    if constexpr (S::kQInRegisters) {
      multiply_queries_k<S>(scores, queries, hopper::moved(k, k_slot * kSlotK));
    } else {
      multiply_q_k<S>(scores, hopper::moved(q, q_slot * kSlotQ), hopper::moved(k, k_slot * kSlotK));
    }
    hopper::wgmma_commit();
    at_k.advance();
  };
  // Of the block `behind` at_k: a place of its own for values would take registers that steps need.
  const auto multiply_values = [&](Outputs<S>& outputs, const Weights<S>& weights, bool adds,
                                   int behind) {
    const auto at_v = at_k.before(behind);
    const int v_slot = hopper::uniform(at_v.slot);
    shared.ring_v.wait_full(at_v);
    hopper::wgmma_fence();
    multiply_weights_v<S>(outputs, weights, hopper::moved(v, v_slot * kSlotV), adds);
    hopper::wgmma_commit();
  };
  // Where the scores made last, of the block from which on the tile has `keys`, are the tile's
  // last.
  const auto release_q = [&](int32_t keys) {
    if (S::kQInRegisters || keys > S::kTileN) return;
    if constexpr (!S::kStagesResults) ring_q.release(at_q.slot, thread);
    at_q.advance();
  };
  // A slot of q that results leave through is given back once they have, a step later. With q in
  // registers that is so of every tile's, after its first scores: `now`.
  constexpr int kNone = -1;
  [[maybe_unused]] int held = kNone;
  const auto give_back = [&](bool now) {
    if constexpr (S::kStagesResults) {
      if (S::kQInRegisters ? !now : held == kNone) return;
      if (thread % 32 == 0) {
        hopper::tma_store_wait_read<0>();
        hopper::arrive(ring_q.empty[S::kQInRegisters ? 0 : held]);
      }
      held = kNone;
      __syncwarp();
    }
  };

  // Consumer 0 has the first turn.
  if (consumer == S::kConsumers - 1) hopper::barrier_arrive(its_turn, kBoth);
  Softmax softmax(params.scale);
  QueryTile tile = next_tile();
  const auto leave = [&](Outputs<S>& outputs, float (&lse)[2], [[maybe_unused]] int q_slot) {
    const ConsumerRows rows(tile, consumer);
    if constexpr (S::kStagesResults) {
      if (q_slot != kNone) {
        return stage_results<S>(shared.q[consumer][q_slot][0], params, outputs, lse, rows);
      }
    }
    store_results<S>(params, outputs, lse, rows);
  };
  while (!tile.is_last()) {
    if (!has_rows(tile)) {
      if (tile.loaded_in_vain(consumer * kConsumerRows)) {
        ring_q.wait_full(at_q);
        ring_q.release(at_q.slot, S::kWarpsReleaseQ ? thread % 32 : thread);
        at_q.advance();
      }
      for (int32_t key = 0; key < tile.kv_len; key += S::kTileN) {
        shared.ring_k.wait_full(at_k);
        hopper::barrier_wait(my_turn, kBoth);
        hopper::barrier_arrive(its_turn, kBoth);
        shared.ring_k.release(at_k.slot, thread);
        shared.ring_v.wait_full(at_k);
        shared.ring_v.release(at_k.slot, thread);
        at_k.advance();
      }
      __syncwarp();
      tile = next_tile();
      continue;
    }
    Outputs<S> outputs;
    Weights<S> weights;
    softmax.start();
    wait_q();
    shared.ring_k.wait_full(at_k);
    {
      Scores<S> scores;
      multiply_scores(scores);
      hopper::barrier_arrive(its_turn, kBoth);
      hopper::wgmma_wait<0>();
      hopper::fence_registers(scores);
      shared.ring_k.release(at_k.slot_before(1), thread);
      release_q(tile.kv_len);
      softmax.update(scores, tile.kv_len);
      round_weights<S>(weights, scores);
    }

    int32_t keys_left = tile.kv_len - S::kTileN;
    bool adds = false;      // to outputs of blocks before
    bool is_there = false;  // the next block of keys
    QueryTile next = tile;
    float lse[2];
    int done_q = kNone;  // of two slots, that of the tile whose last scores are made
    // Returns by what outputs are to be multiplied. Written out in the loop, ptxas would move some
    // of the exponentials past the wait for the second product.
    const auto step = [&](bool finishes) {
      Scores<S> scores;
      if (!is_there) shared.ring_k.wait_full(at_k);
      multiply_scores(scores);
      multiply_values(outputs, weights, adds, 2);
      hopper::barrier_arrive(its_turn, kBoth);
      is_there = shared.ring_k.is_full(at_k);
      hopper::wgmma_wait<1>();  // the scores
      hopper::fence_registers(scores);
      shared.ring_k.release(at_k.slot_before(1), thread);
      const auto leave_q = [&] {
        release_q(keys_left);
        give_back(!finishes && !adds);
      };
      if constexpr (S::kConfig.waits_early) leave_q();
      float2 factor;
      if (finishes) {
        factor = softmax.finish(lse);
        softmax.start();
      }
      const float2 correction = softmax.update(scores, keys_left);
      if (!finishes) factor = correction;
      // Not before the softmax, because ptxas moves the exponentials past a wait that follows them
      // without a branch between.
      if constexpr (!S::kConfig.waits_early) leave_q();
      hopper::wgmma_wait<0>();
      hopper::fence_registers(outputs);
      shared.ring_v.release(at_k.slot_before(2), thread);
      round_weights<S>(weights, scores);
      return factor;
    };
    for (;;) {
      const bool finishes = keys_left <= 0;
      if (finishes) {
        give_back(!adds);
        if constexpr (S::kStagesResults && !S::kQInRegisters) done_q = at_q.slot_before(1);
        next = next_tile();
        // Parts don't go on across tiles either: their results leave below.
        if (next.is_last() || !has_rows(next) || params.is_split()) break;
        keys_left = next.kv_len;
        wait_q();
      }
      const float2 factor = step(finishes);
      // Mostly not. A row's own factor is 1 then: what other rows need changes nothing for it.
      if (__any_sync(0xffffffffu, factor.x != 1 || factor.y != 1)) {
        scale_rows<S>(outputs, factor.x, factor.y);
      }
      keys_left -= S::kTileN;
      adds = !finishes;
      if (finishes) {
        const int q_slot = S::kQInRegisters ? 0 : done_q;
        leave(outputs, lse, q_slot);
        if constexpr (S::kStagesResults) held = q_slot;
        __syncwarp();
        tile = next;
      }
    }
    multiply_values(outputs, weights, adds, 1);
    const float2 factor = softmax.finish(lse);
    hopper::wgmma_wait<0>();
    hopper::fence_registers(outputs);
    shared.ring_v.release(at_k.slot_before(1), thread);
    scale_rows<S>(outputs, factor.x, factor.y);
    if (params.is_split()) {
      if (tile.part < params.most_parts) {  // always, of offsets that belong to the candidates
        keep_results<S>(kept_results<S>(params, tile.part), outputs, lse, consumer);
      }
    } else {
      leave(outputs, lse, done_q);
    }
    __syncwarp();
    held = done_q;
    give_back(false);
    tile = next;
  }
  // A turn was handed on after the last scores as after all others: consumer 0 takes it.
  if (consumer == 0) hopper::barrier_wait(my_turn, kBoth);
}

// Of group 2, each warp those of the ring that it fills.
template <class S>
__device__ void init_barriers(Shared<S>& shared, int warp) {
  if (warp == 0) {
    shared.tiles.init_by_warp();
  } else if (warp == 1) {
    for (auto& ring : shared.ring_q) ring.init_by_warp();
  } else if (warp == 2) {
    shared.ring_k.init_by_warp();
  } else {
    shared.ring_v.init_by_warp();
  }
  hopper::fence_barrier_init();
}

template <class S>
__global__ void __launch_bounds__(S::kConfig.threads(), 1)
    candidate_attention_sm90(const __grid_constant__ Params params) {
  extern __shared__ char unaligned[];
  const uint32_t base = hopper::shared_address(unaligned);
  constexpr uint32_t kAtom = hopper::kSwizzleAtomBytes;
  auto& shared = *reinterpret_cast<Shared<S>*>(unaligned + (kAtom - base % kAtom) % kAtom);
  const int group = hopper::warp_group_index(), warp = hopper::warp_index() % 4;
  // In either branch, everything after the wait may read or write what kernels before this one use.
  if (group < S::kConsumers) {
    hopper::wait_for_previous_kernel();
    hopper::barrier_wait(NamedBarrier::kSetUp, S::kConfig.threads());
    hopper::take_registers<S::kConfig.consumer_registers()>();
    return consume<S>(shared, params, group);
  }
  init_barriers(shared, warp);
  hopper::barrier_arrive(NamedBarrier::kSetUp, S::kConfig.threads());
  const QueryTile guess = guess_first_tile<S>(params);
  if (hopper::elect_one()) ask_early(params, guess, warp);
  __syncwarp();
  hopper::wait_for_previous_kernel();
  // Each by the warp that has set up the ring. Values, which are needed last, are asked for last.
  if (warp == 1 && hopper::elect_one()) load_q_early(shared, params, guess);
  if (warp == 2 && hopper::elect_one()) {
    load_blocks_early<S, S::kHeadQk>(shared.k, shared.ring_k, params.k, params, guess);
  }
  __syncwarp();
  hopper::barrier_wait(NamedBarrier::kProducers, kGroupThreads);
  if (warp == 3 && hopper::elect_one()) {
    load_blocks_early<S, S::kHeadV>(shared.v, shared.ring_v, params.v, params, guess);
  }
  const int32_t early_keys = guess.early_keys(S::kStages, S::kTileN);
  hopper::give_registers<S::kConfig.other_registers()>();
  if (warp == 0) {
    find_tiles(shared, params, guess);
  } else if (warp == 1) {
    load_q(shared, params, guess.rows);
  } else if (warp == 2) {
    if (hopper::elect_one()) load_k(shared, params, early_keys);
  } else {
    if (hopper::elect_one()) load_v(shared, params, early_keys);
  }
}

}  // namespace ikbo::attention
