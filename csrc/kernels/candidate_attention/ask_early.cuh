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
  if (params.expected_tiles == 0) return;
  const int32_t index = blockIdx.x, tile = params.parts.divide(index);
  const int32_t of_head = tile / params.expected_tiles;
  const int32_t user = of_head / runs.H, head = of_head % runs.H;
  if (user >= runs.U) return;
  if (warp == 1) {
    const int64_t before = int64_t{runs.B} * user / runs.U * runs.S.divisor();
    const auto row = static_cast<int32_t>(before) + tile % params.expected_tiles * S::kTileM;
    for (int of_tile = 0; of_tile < S::kTileM; of_tile += kConsumerRows) {
      for (int d = 0; d < S::kHeadQk; d += kBlock) {
        hopper::prefetch_box(map, d, head, row + of_tile);
      }
    }
    return;
  }
  const int32_t kv_head = params.heads_per_kv.divide(head);
  const uint32_t blocks = (runs.L + S::kTileN - 1) / S::kTileN;
  const uint32_t part = params.parts.remainder(index, tile);
  const auto first = static_cast<int32_t>(part * blocks / params.parts.divisor()) * S::kTileN;
  const int head_size = warp == 2 ? S::kHeadQk : S::kHeadV;
  for (int d = 0; d < head_size; d += kBlock) hopper::prefetch_box(map, d, kv_head, first, user);
}

}  // namespace ikbo::attention
