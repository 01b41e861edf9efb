// Blocks of keys of the tiles that don't fill a round, dealt out evenly among all CTAs: each gets
// one run of them, which may begin and end within a tile. A pure function, tested on the CPU.
#pragma once

#include <cstdint>

#include "config/fast_divisor.h"

namespace ikbo {

// What a CTA works on: some blocks of one tile.
struct BlocksOfTile {
  int32_t tile;        // of those that are shared
  int32_t first, end;  // blocks
  // Without the tile's first block it leaves its results to the one that has it.
  constexpr bool keeps() const { return first > 0; }
};

// `tiles` of `blocks_of_tile` blocks each among `ctas`; their product stays below 2^31.
struct SharedBlocks {
  FastDivisor ctas, blocks_of_tile;

  constexpr int32_t blocks(int32_t tiles) const { return tiles * blocks_of_tile.divisor(); }
  // Where run `run` begins, which is where the one before ends.
  constexpr int32_t begin(int32_t tiles, int32_t run) const {
    const int32_t each = ctas.divide(blocks(tiles));
    const int32_t left = ctas.remainder(blocks(tiles), each);
    return run * each + (run < left ? run : left);
  }
  // The first tile of what is left of a run.
  constexpr BlocksOfTile take(int32_t begin, int32_t end) const {
    const int32_t tile = blocks_of_tile.divide(begin);
    const int32_t start = tile * blocks_of_tile.divisor();
    const int32_t tile_end = start + blocks_of_tile.divisor();
    return {tile, begin - start, (end < tile_end ? end : tile_end) - start};
  }
  // How many runs after `run`, which has the tile's first block, have some of its blocks.
  constexpr int32_t sharers(int32_t tiles, int32_t run, int32_t tile) const {
    const int32_t tile_end = (tile + 1) * blocks_of_tile.divisor();
    int32_t count = 0;
    while (begin(tiles, run + count + 1) < tile_end) ++count;
    return count;
  }
};

}  // namespace ikbo
