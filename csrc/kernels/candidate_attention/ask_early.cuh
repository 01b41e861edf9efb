// What a CTA asks for while the kernel before may still run. It may read nothing then, its tiles
// least of all; but it can have what its first tile reads brought into L2, where that is guessed as
// if candidates were grouped and spread evenly over users. A wrong guess costs the traffic.
#pragma once

#include "hopper/tma.cuh"
#include "kernels/candidate_attention/shape.cuh"

namespace ikbo::attention {

// One thread of each warp of group 2: what the warp will read.
template <class S>
__device__ void ask_early(const Params& params, int warp) {
  const UserRuns& runs = params.runs;
  if (warp == 0) {
    hopper::prefetch_global(runs.user_offsets);
    if (runs.kv_start != nullptr) hopper::prefetch_global(runs.kv_start);
    if (runs.kv_len != nullptr) hopper::prefetch_global(runs.kv_len);
    return;
  }
  const CUtensorMap& map = warp == 1 ? params.q : warp == 2 ? params.k : params.v;
  hopper::prefetch_tensor_map(map);
  const Guess& guess = params.guess;
  if (!guess.is_likely) return;
  const int32_t index = blockIdx.x, tile = params.parts.divide(index);
  const int32_t of_head = guess.tiles.divide(tile), user = guess.heads.divide(of_head);
  const int32_t head = guess.heads.remainder(of_head, user);
  if (user >= runs.U) return;
  if (warp == 1) {
    const int32_t row = user * guess.rows + guess.tiles.remainder(tile, of_head) * S::kTileM;
    for (int of_tile = 0; of_tile < S::kTileM; of_tile += kConsumerRows) {
      for (int d = 0; d < S::kHeadQk; d += kBlock) {
        hopper::prefetch_box(map, d, head, row + of_tile);
      }
    }
    return;
  }
  const int32_t kv_head = params.heads_per_kv.divide(head);
  const int32_t blocks = (runs.L - 1) / S::kTileN + 1, part = params.parts.remainder(index, tile);
  const int32_t first = params.parts.divide(part * blocks);
  const int32_t end = min(params.parts.divide((part + 1) * blocks), first + S::kStages);
  const int head_size = warp == 2 ? S::kHeadQk : S::kHeadV;
  // Until they are read they stay, whatever comes after.
  const hopper::L2Hint hint = params.keys_hint == hopper::L2Hint::kEvictFirst
                                  ? hopper::L2Hint::kNormal
                                  : hopper::L2Hint::kEvictLast;
  for (int32_t block = first; block < end; ++block) {
    for (int d = 0; d < head_size; d += kBlock) {
      hopper::prefetch_box(map, hint, d, kv_head, block * S::kTileN, user);
    }
  }
}

}  // namespace ikbo::attention
