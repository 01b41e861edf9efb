// A tile whose keys are cut into parts, each for a CTA of its own, which keeps its results in
// global memory. A kernel that follows adds them up: by then they are all there, so that no CTA
// waits for another.
#pragma once

#include <cmath>

#include "hopper/dependent_launch.cuh"
#include "kernels/activation.cuh"
#include "kernels/candidate_attention/kept_results.cuh"

namespace ikbo::attention {

// What a warp adds up: 16 rows by 16 columns of a tile, which leaves room in registers for eight
// parts' at once.
template <class S>
struct AddedParts {
  static constexpr int kSlices = S::kHeadV / 16;
  static constexpr int kOfTile = S::kConsumers * 4 * kSlices;
  static constexpr int kWarps = 4;  // of a CTA
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
  const int32_t first_row = consumer * kConsumerRows + warp * 16;
  const bool has_rows = !tile.is_last() && first_row < tile.rows;
  int32_t in_batch[2];
  bool exists[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = first_row + lane / 4 + 8 * half;
    in_batch[half] = runs.all_rows();
    if (has_rows && row < tile.rows) {
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
  using Kept = KeptResults<S>;
  const Kept& kept = kept_results<S>(params, tile_index * parts);
  const float4* from = &kept.outputs[consumer][2 * slice][warp * 32 + lane];
  const float2* lse_from = &kept.lse[consumer][warp * 32 + lane];
  constexpr int kStride = sizeof(Kept) / sizeof(float4), kLseStride = sizeof(Kept) / sizeof(float2);
  hopper::wait_for_previous_kernel();
  if (!has_rows) return;

  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {}, total[8] = {};
#pragma unroll 1
  for (; there != 0; there >>= kAtOnce) {
    const uint32_t mask = there;
    float4 outputs[kAtOnce][2];
    float2 lse[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        outputs[i][j] = {};
        if (mask >> i & 1) outputs[i][j] = __ldcg(from + i * kStride + j * kGroupThreads);
      }
    }
    // Or ptxas asks for these first, and for half of the others only after it has waited for them.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      lse[i] = {-INFINITY, -INFINITY};
      if (mask >> i & 1) lse[i] = __ldcg(lse_from + i * kLseStride);
    }
    from += kAtOnce * kStride;
    lse_from += kAtOnce * kLseStride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto of_part = [&](int i) { return half == 0 ? lse[i].x : lse[i].y; };
      float largest = maximum[half];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) largest = fmaxf(largest, of_part(i));
      // All -inf so far: no weight, rather than exp(-inf - -inf).
      const float offset = largest == -INFINITY ? 0 : largest * activation::kLog2e;
      const auto weight_of = [&](float lse) {
        return activation::exp2(fmaf(lse, activation::kLog2e, -offset));
      };
      const float before = weight_of(maximum[half]);
      maximum[half] = largest;
      sum[half] *= before;
#pragma unroll
      for (int j = 0; j < 4; ++j) total[j / 2 * 4 + 2 * half + j % 2] *= before;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = weight_of(of_part(i));
        sum[half] += weight;
        if (weight == 0) continue;  // outputs of a part whose scores are all -inf are NaN
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& of_column = total[j / 2 * 4 + 2 * half + j % 2];
          of_column = fmaf(weight, (&outputs[i][j / 2].x)[2 * half + j % 2], of_column);
        }
      }
    }
  }
  // Four neighbouring lanes hold two columns each of two times eight of two rows: they exchange
  // them, so that each stores eight columns of one row.
  uint32_t words[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = !exists[half] ? NAN : sum[half] == 0 ? 0 : __fdividef(1, sum[half]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float* const pair = &total[4 * j + 2 * half];
      words[2 * half + j] = pack<T>(pair[0] * scale, pair[1] * scale);
    }
    const bool writes_lse = params.lse != nullptr && slice == 0 && lane % 4 == 0;
    if (writes_lse && in_batch[half] < runs.all_rows()) {
      const float lse = sum[half] == 0 ? -INFINITY : maximum[half] + logf(sum[half]);
      write_lse(params, in_batch[half], tile.head, exists[half] ? lse : NAN);
    }
  }
  transpose_of_four(words);
  const int32_t row = lane & 2 ? in_batch[1] : in_batch[0], d = slice * 16 + lane % 2 * 8;
  if (row < runs.all_rows() && d < params.Dv) {
    *reinterpret_cast<uint4*>(result_of<T>(params, row, tile.head) + d) = {words[0], words[1],
                                                                           words[2], words[3]};
  }
}

}  // namespace ikbo::attention
