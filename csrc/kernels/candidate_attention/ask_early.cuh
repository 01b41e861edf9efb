// What a CTA does about its first tile while the kernel before may still run. It may read nothing
// then, its tiles least of all; but it can guess the tile, as if candidates were grouped and spread
// evenly over users, and have what that one reads brought into L2. Once the kernel before has ended
// q and the first blocks of keys are loaded from there (loads.cuh) while the guess is checked. A
// wrong guess costs the traffic, and the wait until it has come.
#pragma once

#include "hopper/tma.cuh"
#include "kernels/candidate_attention/shape.cuh"

namespace ikbo::attention {

// The last tile where there is nothing to guess.
template <class S>
__device__ QueryTile guess_first_tile(const Params& params) {
  const int32_t index = blockIdx.x, of_tiles = params.parts.divide(index);
  QueryTile tile = guessed_tile<S::kTileM>(params.runs, params.guess, of_tiles);
  if (params.is_split()) {
    tile.take_part(params.parts.remainder(index, of_tiles), params.parts.divisor(), S::kTileN);
    tile.part = index;
  }
  return tile;
}

// One thread of each warp of group 2: what the warp will read.
template <class S>
__device__ void ask_early(const Params& params, const QueryTile& guess, int warp) {
  if (warp == 0) {
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
    return;
  }
  const CUtensorMap& map = warp == 1 ? params.q : warp == 2 ? params.k : params.v;
  hopper::prefetch_tensor_map(map);
  if (guess.is_last()) return;
  if (warp == 1) {
    for (int of_tile = 0; of_tile < guess.rows; of_tile += kConsumerRows) {
      for (int d = 0; d < S::kHeadQk; d += kBlock) {
        hopper::prefetch_box(map, d, guess.head, guess.first_row + of_tile);
      }
    }
    return;
  }
  const int32_t kv_head = params.heads_per_kv.divide(guess.head);
  const int head_size = warp == 2 ? S::kHeadQk : S::kHeadV;
  // Until they are read they stay, whatever comes after.
  const hopper::L2Hint hint = params.keys_hint == hopper::L2Hint::kEvictFirst
                                  ? hopper::L2Hint::kNormal
                                  : hopper::L2Hint::kEvictLast;
  for (int32_t key = 0; key < guess.early_keys(S::kStages, S::kTileN); key += S::kTileN) {
    for (int d = 0; d < head_size; d += kBlock) {
      hopper::prefetch_box(map, hint, d, kv_head, guess.kv_row + key, guess.kv_batch);
    }
  }
}

}  // namespace ikbo::attention
