// A tile whose keys are cut into parts, each for a CTA of its own, which keeps its results in
// global memory. A kernel that follows adds them up: by then they are all there, so that no CTA
// waits for another.
#pragma once

#include <cmath>

#include "hopper/dependent_launch.cuh"
#include "kernels/candidate_attention/kept_results.cuh"

namespace ikbo::attention {

// What a warp adds up: 16 rows by 32 columns of a tile.
template <class S>
struct AddedParts {
  static constexpr int kSlices = S::kHeadV / 32;
  static constexpr int kOfTile = S::kConsumers * 4 * kSlices;
  static constexpr int kWarps = 2;  // of a CTA: small ones find room beside one another
};

// A part weighs exp(lse of the part - lse), lse = log(sum of exp(lse of a part)). In the order of
// the parts.
template <class S>
__global__ void __launch_bounds__(AddedParts<S>::kWarps * 32)
    add_attention_parts(const __grid_constant__ Params params) {
  using T = typename S::T;
  using Added = AddedParts<S>;
  constexpr int kAtOnce = 8;  // parts whose loads are on their way together
  const int32_t index = blockIdx.x * Added::kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, of_tile = index % Added::kOfTile;
  const int slice = of_tile % Added::kSlices, warp = of_tile / Added::kSlices % 4;
  const int consumer = of_tile / Added::kSlices / 4;
  // The next kernel waits for this one, which waits for the one ahead: nothing overtakes.
  hopper::allow_next_kernel();
  // The kernel ahead waited for what comes before it, so that maps can be read at once.
  const UserRuns& runs = params.runs;
  const int32_t tile_index = index / Added::kOfTile;
  const QueryTile tile = TileFinder<S::kTileM>(runs).find(tile_index);
  int32_t in_batch[2];
  bool exists[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = consumer * kConsumerRows + warp * 16 + lane / 4 + 8 * half;
    in_batch[half] = runs.all_rows();
    if (!tile.is_last() && row < tile.rows) {
      in_batch[half] = runs.row_of_batch(tile.first_row + row);
    }
    exists[half] = tile.kv_len > 0;
    if (tile.kv_len == 0 && in_batch[half] < runs.all_rows()) {
      const int32_t user = params.cand_to_user[runs.S.divide(in_batch[half])];
      exists[half] = user >= -1 && user < runs.U;
    }
  }
  // What can be known before the results are there is: a bit for each part that has keys, and where
  // its results will be.
  const int32_t parts = params.parts.divisor(), blocks = tile.key_tiles(S::kTileN);
  static_assert(AttentionConfig::kMaxParts <= 64);
  const auto parts_with_keys = [&](int32_t part) {
    return __ballot_sync(0xffffffffu,
                         part < parts && QueryTile::part_has_blocks(part, parts, blocks));
  };
  uint64_t there = parts_with_keys(lane) | uint64_t{parts_with_keys(32 + lane)} << 32;
  const KeptResults<S>* kept = &kept_results<S>(params, tile_index * parts);
  hopper::wait_for_previous_kernel();
  if (tile.is_last()) return;

  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {}, total[16] = {};
#pragma unroll 1
  for (; there != 0; there >>= kAtOnce, kept += kAtOnce) {
    float2 lse[kAtOnce];
    float4 outputs[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool is_there = there >> i & 1;
      lse[i] = {-INFINITY, -INFINITY};
      if (is_there) lse[i] = __ldcg(&kept[i].lse[consumer][warp * 32 + lane]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        outputs[i][j] = {};
        if (!is_there) continue;
        outputs[i][j] = __ldcg(&kept[i].outputs[consumer][slice * 4 + j][warp * 32 + lane]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto of_part = [&](int i) { return half == 0 ? lse[i].x : lse[i].y; };
      float largest = maximum[half];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) largest = fmaxf(largest, of_part(i));
      // All -inf so far: no weight, rather than exp(-inf - -inf).
      const float offset = largest == -INFINITY ? 0 : largest;
      const float before = __expf(maximum[half] - offset);
      maximum[half] = largest;
      sum[half] *= before;
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j / 2 * 4 + 2 * half + j % 2] *= before;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = __expf(of_part(i) - offset);
        sum[half] += weight;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          // Outputs of a part whose scores are all -inf are NaN.
          const float output = (&outputs[i][j / 2].x)[2 * half + j % 2];
          total[j / 2 * 4 + 2 * half + j % 2] += weight == 0 ? 0 : weight * output;
        }
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = !exists[half] ? NAN : sum[half] == 0 ? 0 : 1 / sum[half];
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j / 2 * 4 + 2 * half + j % 2] *= scale;
    const bool is_there = in_batch[half] < runs.all_rows();
    store_columns(params, result_of<T>(params, in_batch[half], tile.head), is_there, slice * 32,
                  &total[2 * half]);
    if (is_there && params.lse != nullptr && slice == 0 && lane % 4 == 0) {
      const float lse = sum[half] == 0 ? -INFINITY : maximum[half] + logf(sum[half]);
      write_lse(params, in_batch[half], tile.head, exists[half] ? lse : NAN);
    }
  }
}

}  // namespace ikbo::attention
