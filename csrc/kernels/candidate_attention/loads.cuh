// The warps of group 2: one finds the CTA's tiles, three load.
#pragma once

#include <limits>

#include "hopper/cluster.cuh"
#include "hopper/tma.cuh"
#include "kernels/candidate_attention/shape.cuh"

namespace ikbo::attention {

// A whole warp. A CTA of a cluster, whose parts are those of a tile, has one tile. By tickets, a
// tile is taken when all have begun the one before: taken earlier it would wait here while other
// CTAs have nothing to do.
inline constexpr int32_t kNoTile = std::numeric_limits<int32_t>::max();

template <class S>
__device__ void find_tiles(Shared<S>& shared, const Params& params) {
  TileFinder<S::kTileM, S::kClusterM> finder(params.runs, params.ticket != nullptr);
  typename S::Tiles::Position position;
  const bool writes = threadIdx.x % 32 == 0;
  const int32_t rank = S::kClusterM > 1 ? hopper::cluster_cta_rank() : 0;
  const int32_t step = gridDim.x / S::kClusterM;
  int32_t index = blockIdx.x / S::kClusterM;  // of parts of tiles
  for (;; position.advance()) {
    const int32_t of_tiles = params.parts.divide(index);
    QueryTile tile = finder.find(of_tiles, rank);
    if (params.is_split()) {
      tile.take_part(params.parts.remainder(index, of_tiles), params.parts.divisor(), S::kTileN);
    }
    if (writes) shared.tiles.write(position, typename S::Tile{tile});
    if (tile.is_last()) return;
    if (params.is_split()) {
      index = kNoTile;
      continue;
    }
    if (params.ticket == nullptr) {
      index += step;
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

// A whole warp: where rows don't lie side by side, each lane loads some of them. Waits for a slot
// until the consumer has made the last scores of the tile that had it before.
template <class S>
__device__ void load_q(Shared<S>& shared, const Params& params) {
  const int lane = threadIdx.x % 32;
  const int32_t together = params.rows_together;
  typename S::Tiles::Position at;
  typename S::RingQ::Position positions[S::kConsumers];
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

// For this CTA or both of a pair.
template <class S>
__device__ inline void load_keys(bool shares, void* to, const CUtensorMap& map,
                                 hopper::Barrier& full, int32_t d, int32_t head, int32_t row,
                                 int32_t batch) {
  if (S::kClusterM == 1 || !shares) {
    hopper::tma_load(to, map, full, hopper::L2Hint::kEvictLast, d, head, row, batch);
  } else {
    constexpr uint16_t kAllCtas = (1 << S::kClusterM) - 1;
    hopper::tma_load_multicast(to, map, full, hopper::L2Hint::kEvictLast, kAllCtas, d, head, row,
                               batch);
  }
}

// Of a block of keys, in boxes of kTileN / kClusterM.
template <class S>
struct RowsToLoad {
  int32_t first = 0, end = S::kTileN;
  __device__ explicit RowsToLoad(const QueryTile& tile) {
    if (S::kClusterM == 1 || !tile.shares) return;
    first = hopper::cluster_cta_rank() * (S::kTileN / S::kClusterM);
    end = first + S::kTileN / S::kClusterM;
  }
};

// One thread. Waits until both consumers have released a stage.
template <class S>
__device__ void load_k(Shared<S>& shared, const Params& params) {
  typename S::Tiles::Position at;
  typename S::Ring::Position position;
  constexpr int32_t kRows = S::kTileN / S::kClusterM;
  for (;; at.advance()) {
    const QueryTile tile = shared.tiles.read_alone(at);
    if (tile.is_last()) return;
    const int32_t kv_head = params.heads_per_kv.divide(tile.head);
    const RowsToLoad<S> rows(tile);
#pragma unroll 1
    for (int32_t key = 0; key < tile.kv_len; key += S::kTileN, position.advance()) {
      hopper::Barrier& full = shared.ring_k.produce(position, S::kConfig.k_bytes());
      for (int32_t mine = rows.first; mine < rows.end; mine += kRows) {
#pragma unroll
        for (int d = 0; d < S::kHeadQk / kBlock; ++d) {
          load_keys<S>(tile.shares, shared.k[position.slot][d] + mine * kBlock, params.k, full,
                       d * kBlock, kv_head, tile.kv_row + key + mine, tile.kv_batch);
        }
      }
    }
  }
}

// One thread, likewise.
template <class S>
__device__ void load_v(Shared<S>& shared, const Params& params) {
  typename S::Tiles::Position at;
  typename S::Ring::Position position;
  constexpr int32_t kRows = S::kTileN / S::kClusterM;
  for (;; at.advance()) {
    const QueryTile tile = shared.tiles.read_alone(at);
    if (tile.is_last()) return;
    const int32_t kv_head = params.heads_per_kv.divide(tile.head);
    const RowsToLoad<S> rows(tile);
#pragma unroll 1
    for (int32_t first = 0; first < tile.kv_len; first += S::kTileN, position.advance()) {
      hopper::Barrier& full = shared.ring_v.produce(position, S::kConfig.v_bytes());
      const int32_t keys = tile.kv_len - first;
      const auto load = [&](const CUtensorMap& map, int32_t row_in_block, int32_t row) {
#pragma unroll
        for (int d = 0; d < S::kHeadV / kBlock; ++d) {
          load_keys<S>(tile.shares, shared.v[position.slot][d] + row_in_block * kBlock, map, full,
                       d * kBlock, kv_head, row, tile.kv_batch);
        }
      };
      // Zeros follow the last row of the tensor by themselves.
      if (keys >= S::kTileN || tile.kv_row + tile.kv_len == params.runs.L) {
        for (int32_t mine = rows.first; mine < rows.end; mine += kRows) {
          load(params.v, mine, tile.kv_row + first + mine);
        }
        continue;
      }
      // What follows the last key elsewhere may be NaN, which a weight of 0 doesn't remove: eight
      // rows at a time up to it, single rows, and zeros.
#pragma unroll 1
      for (int32_t row = rows.first; row < rows.end; row += kFewRows) {
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
