// The warps of group 2: one finds the CTA's tiles, three load. The first tile may be guessed, as if
// candidates were grouped and spread evenly over users: then q and as many blocks as the rings hold
// are loaded before it is found. If the guess was wrong it is the CTA's first tile nevertheless,
// with these blocks and without rows: consumers let them go by.
#pragma once

#include "hopper/dependent_launch.cuh"
#include "hopper/tma.cuh"
#include "kernels/candidate_attention/shape.cuh"

namespace ikbo::attention {

// The last tile where there is nothing to guess.
template <class S>
__device__ QueryTile guess_first_tile(const Params& params) {
  if constexpr (S::kSharesKeys) return {-1};  // the tiles it finds are others
  const int32_t index = blockIdx.x, of_tiles = params.parts.divide(index);
  QueryTile tile = guessed_tile<S::kTileM>(params.runs, params.guess, of_tiles);
  if (params.is_split()) {
    tile.take_part(params.parts.remainder(index, of_tiles), params.parts.divisor(), S::kTileN);
    tile.part = index;
  }
  return tile;
}

// One thread of each warp, while the kernel before may still run and nothing may be read yet: what
// says where the first tile is.
__device__ inline void ask_early(const Params& params, const QueryTile& guess, int warp) {
  if (warp > 0) {
    return hopper::prefetch_tensor_map(warp == 1 ? params.q : warp == 2 ? params.k : params.v);
  }
  const UserRuns& runs = params.runs;
  constexpr int32_t kUsers = 32 / sizeof(int32_t);  // of a prefetch
  const int32_t users = guess.is_last() ? min(runs.U, 32) : guess.kv_batch + 1;
#pragma unroll 1
  for (int32_t user = 0; user <= users; user += kUsers) {
    hopper::prefetch_global(runs.user_offsets + user);
  }
#pragma unroll 1
  for (int32_t user = 0; user < users; user += kUsers) {
    if (runs.kv_start != nullptr) hopper::prefetch_global(runs.kv_start + user);
    if (runs.kv_len != nullptr) hopper::prefetch_global(runs.kv_len + user);
  }
}

// A whole warp. By tickets, a tile is taken when all have begun the one before: taken earlier it
// would wait here while other CTAs have nothing to do.
template <class S>
__device__ void find_tiles(Shared<S>& shared, const Params& params, QueryTile guess) {
  typename S::Tiles::Position position;
  const bool writes = threadIdx.x % 32 == 0;
  int32_t index = blockIdx.x;  // of tiles or their parts
  if (!guess.is_last()) {
    // A single trip to memory, which takes half as long as finding the tile.
    if (params.runs.are_even(guess.kv_batch + 1, params.guess.candidates)) {
      index += gridDim.x;
    } else {
      guess.give_up(S::kStages, S::kTileN);
    }
    if (writes) shared.tiles.write(position, typename S::Tile{guess});
    position.advance();
  }
  TileFinder<S::kTileM> finder(params.runs, params.ticket != nullptr);
  for (;; position.advance()) {
    const int32_t of_tiles = params.parts.divide(index);
    QueryTile tile = finder.find(of_tiles);
    if (params.is_split()) {
      tile.take_part(params.parts.remainder(index, of_tiles), params.parts.divisor(), S::kTileN);
      tile.part = index;
    }
    if (writes) shared.tiles.write(position, typename S::Tile{tile});
    if (tile.is_last()) return;
    if (params.ticket == nullptr) {
      index += gridDim.x;
      continue;
    }
    uint32_t ticket = 0;
    if (writes) {
      shared.tiles.wait_read(position);
      ticket = atomicAdd(params.ticket, 1u);
    }
    index = static_cast<int32_t>(gridDim.x + __shfl_sync(0xffffffffu, ticket, 0));
  }
}

// One thread: the rows of a guessed tile, which lie side by side.
template <class S>
__device__ void load_q_early(Shared<S>& shared, const Params& params, const QueryTile& guess) {
  if (guess.is_last()) return;
  const typename S::RingQ::Position position;
#pragma unroll
  for (int consumer = 0; consumer < S::kConsumers; ++consumer) {
    if (guess.rows <= consumer * kConsumerRows) break;
    hopper::Barrier& full = shared.ring_q[consumer].produce(position, S::kConfig.q_bytes());
#pragma unroll
    for (int d = 0; d < S::kHeadQk / kBlock; ++d) {
      hopper::tma_load(shared.q[consumer][0][d], params.q, full, hopper::L2Hint::kEvictFirst,
                       d * kBlock, guess.head, guess.first_row + consumer * kConsumerRows);
    }
  }
}

// A whole warp: where rows don't lie side by side, each lane loads some of them. Waits for a slot
// until the consumer has made the last scores of the tile that had it before.
template <class S>
__device__ void load_q(Shared<S>& shared, const Params& params, int32_t early_rows) {
  const int lane = threadIdx.x % 32;
  const int32_t together = params.rows_together;
  typename S::Tiles::Position at;
  typename S::RingQ::Position positions[S::kConsumers];
  if (early_rows > 0) {  // all of the first tile
    shared.tiles.read(at);
    at.advance();
#pragma unroll
    for (int consumer = 0; consumer < S::kConsumers; ++consumer) {
      if (early_rows > consumer * kConsumerRows) positions[consumer].advance();
    }
  }
  for (;; at.advance()) {
    const QueryTile tile = shared.tiles.read(at);
    if (tile.is_last()) return;
    if (tile.kv_len <= 0) continue;
#pragma unroll
    for (int consumer = 0; consumer < S::kConsumers; ++consumer) {
      if (tile.rows <= consumer * kConsumerRows) break;
      auto& ring = shared.ring_q[consumer];
      auto& position = positions[consumer];
      if (lane == 0) ring.produce(position, S::kConfig.q_bytes());
      __syncwarp();
      for (int32_t row = lane * together; row < kConsumerRows; row += 32 * together) {
        const int32_t from =
            params.runs.row_of_batch(tile.first_row + consumer * kConsumerRows + row);
#pragma unroll
        for (int d = 0; d < S::kHeadQk / kBlock; ++d) {
          hopper::tma_load(shared.q[consumer][position.slot][d] + row * kBlock, params.q,
                           ring.full[position.slot], hopper::L2Hint::kEvictFirst, d * kBlock,
                           tile.head, from);
        }
      }
      position.advance();
    }
  }
}

// One thread: the first blocks of keys or values of a guessed tile. They are whole, or the last of
// the tensor's, which zeros follow.
template <class S, int kHead>
__device__ void load_blocks_early(
    typename S::T (&blocks)[S::kStages][kHead / kBlock][S::kTileN * kBlock], typename S::Ring& ring,
    const CUtensorMap& map, const Params& params, const QueryTile& guess) {
  constexpr uint32_t kBytes = sizeof(blocks[0]);
  typename S::Ring::Position position;
  const int32_t kv_head = params.heads_per_kv.divide(guess.head);
#pragma unroll 1
  for (int32_t key = 0; key < guess.early_keys(S::kStages, S::kTileN);
       key += S::kTileN, position.advance()) {
    hopper::Barrier& full = ring.produce(position, kBytes);
#pragma unroll
    for (int d = 0; d < kHead / kBlock; ++d) {
      hopper::tma_load(blocks[position.slot][d], map, full, params.keys_hint, d * kBlock, kv_head,
                       guess.kv_row + key, guess.kv_batch);
    }
  }
}

// One thread. Waits until all consumers have released a stage. `key`: of the first tile, where to
// begin after what was loaded early.
template <class S>
__device__ void load_k(Shared<S>& shared, const Params& params, int32_t key) {
  typename S::Tiles::Position at;
  typename S::Ring::Position position;
  for (int32_t early = 0; early < key; early += S::kTileN) position.advance();
  for (;; at.advance(), key = 0) {
    const QueryTile tile = shared.tiles.read_alone(at);
    if (tile.is_last()) return;
    const int32_t kv_head = params.heads_per_kv.divide(tile.head);
#pragma unroll 1
    for (; key < tile.kv_len; key += S::kTileN, position.advance()) {
      hopper::Barrier& full = shared.ring_k.produce(position, S::kConfig.k_bytes());
#pragma unroll
      for (int d = 0; d < S::kHeadQk / kBlock; ++d) {
        hopper::tma_load(shared.k[position.slot][d], params.k, full, params.keys_hint, d * kBlock,
                         kv_head, tile.kv_row + key, tile.kv_batch);
      }
    }
  }
}

// One thread, likewise. Once all is asked for, the next kernel may start where SMs are free.
template <class S>
__device__ void load_v(Shared<S>& shared, const Params& params, int32_t first) {
  typename S::Tiles::Position at;
  typename S::Ring::Position position;
  for (int32_t early = 0; early < first; early += S::kTileN) position.advance();
  for (;; at.advance(), first = 0) {
    const QueryTile tile = shared.tiles.read_alone(at);
    if (tile.is_last()) return hopper::allow_next_kernel();
    const int32_t kv_head = params.heads_per_kv.divide(tile.head);
#pragma unroll 1
    for (; first < tile.kv_len; first += S::kTileN, position.advance()) {
      hopper::Barrier& full = shared.ring_v.produce(position, S::kConfig.v_bytes());
      const int32_t keys = tile.kv_len - first;
      const auto load = [&](const CUtensorMap& map, int32_t row_in_block, int32_t row) {
#pragma unroll
        for (int d = 0; d < S::kHeadV / kBlock; ++d) {
          hopper::tma_load(shared.v[position.slot][d] + row_in_block * kBlock, map, full,
                           params.keys_hint, d * kBlock, kv_head, row, tile.kv_batch);
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

}  // namespace ikbo::attention
