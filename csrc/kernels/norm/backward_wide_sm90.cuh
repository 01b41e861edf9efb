// The backward of whole, aligned rows of one type over many warps, and over clusters of CTAs. As in
// norm_backward_whole_sm90 every thread copies what it will read itself. A team takes the sums of
// the row ahead before it finishes a row: while they go over its warps and the cluster's CTAs it
// has work, and no barrier of the CTA is left. Rows are read from their stage twice, and the weight
// from shared memory: registers hold the sums over rows.
//
// Sums of a row are taken in the order of norm_backward_sm90, so grad_x has its bits.
#pragma once

#include "hopper/l2_priority.cuh"
#include "kernels/norm/whole.cuh"

namespace ikbo::norm {

// A team's exchange. Its warps are within two rows of one another, and so are a cluster's CTAs:
// four buffers.
template <int kTeamWarps, int kCount, int kStages>
struct WideExchange {
  float of_warp[4][kTeamWarps * kCount];
  float4 of_cta[4][NormMapping::kMaxCluster];
  hopper::Barrier warps[4], ctas[4];
  float statistics[kStages][kTeamWarps][2];  // rstd and mean: each warp's own
  uint32_t turns_seen;                       // of the thread that keeps pace
};

// kSums: with sums of grad_y, as for a LayerNorm or a bias.
template <class T, int kLanes, int kVectors, bool kSums>
__global__ void __launch_bounds__(
    32 * norm_whole_layout(kLanes, kVectors, 16 / sizeof(T), kSums).warps, 1)
    norm_backward_wide_sm90(const __grid_constant__ WholeBackward p) {
  constexpr int kVector = 16 / sizeof(T), kQuads = kVector / 4;
  constexpr NormWhole kLayout = norm_whole_layout(kLanes, kVectors, kVector, kSums);
  constexpr int kTeamWarps = kLanes / 32, kTeams = kLayout.teams, kThreads = kLanes * kTeams;
  constexpr int kStages = kLayout.stages, kColumns = kLayout.cta_columns();
  constexpr int kCount = kSums ? 2 : 1;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ WideExchange<kTeamWarps, kCount, kStages> shared[kTeams];
  static_assert(sizeof(shared) <= kLayout.static_bytes());

  const int thread = threadIdx.x % kLanes, lane = threadIdx.x % 32;
  const int team = threadIdx.x / kLanes, warp = thread / 32;
  const uint32_t rank = p.cluster > 1 ? hopper::cluster_cta_rank() : 0;
  const uint32_t clusters = gridDim.x / p.cluster, index = blockIdx.x / p.cluster;
  WideExchange<kTeamWarps, kCount, kStages>& mine = shared[team];
  if (thread == 0) {
    for (int i = 0; i < 4; ++i) {
      hopper::init(mine.warps[i], kTeamWarps);
      hopper::init(mine.ctas[i], 1);
    }
    mine.turns_seen = 0;
    hopper::fence_barrier_init();
  }
  hopper::touch(p);
  hopper::wait_for_previous_kernel();

  const uint32_t first_column = rank * kColumns;
  // Where this thread's first vector is in a row.
  const uint32_t begin = first_column * sizeof(T) + thread * 16;
  // Places of a stage: of vector and operand, each for all threads.
  constexpr int kPlace = 16 * kThreads, kStage = kLayout.stage_bytes();
  static_assert(kStage == kVectors * 2 * kPlace);
  const uint32_t places = hopper::shared_address(shared_bytes) + 16 * threadIdx.x;
  const auto load_vector = [&](int s, uint32_t row, int v) {
    const uint32_t to = places + s * kStage + v * 2 * kPlace;
    const int bytes = row < p.rows ? 16 : 0;
    const uint64_t last = hopper::evict_last_if(p.evict_last);
    hopper::copy_async_16_zero_filled(
        to, p.x + (uint64_t{row} * p.x_bytes + begin) + v * kLanes * 16, bytes, last);
    hopper::copy_async_16_zero_filled(
        to + kPlace, p.grad_y + (uint64_t{row} * p.grad_y_bytes + begin) + v * kLanes * 16, bytes,
        last);
  };
  const auto end_load = [&](int s, uint32_t row) {
    if (lane < kCount) {
      const float* const from = lane == 0 ? p.rstd : p.mean;
      hopper::copy_async_4_or_zero(&mine.statistics[s][warp][lane], from + row,
                                   row < p.rows && from != nullptr);
    }
    hopper::end_copy_group();
  };
  const uint32_t step = clusters * kTeams;
  uint32_t row = team * clusters + index;
  // Of all of these copies unrolled ptxas 13.0 makes illegal instructions.
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
#pragma unroll 1
    for (int v = 0; v < kVectors; ++v) load_vector(s, row + s * step, v);
    end_load(s, row + s * step);
  }

  // The weight, in T: all teams read the same.
  char* const weights = shared_bytes + kLayout.slots_at() + 16 * thread;
  if (team == 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float ones[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) ones[e] = 1.0f;
      Words<4> words = pack_words<T>(ones);
      if (p.weight) words = load_words<4>(p.weight + begin + v * kLanes * 16);
      *reinterpret_cast<uint4*>(weights + v * kLanes * 16) = {words.word[0], words.word[1],
                                                              words.word[2], words.word[3]};
    }
  }
  if (p.cluster > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }

  const uint32_t shared_weights = hopper::shared_address(weights);
  const auto operands = [&](uint32_t stage, int v, float (&x)[kVector], float (&grad)[kVector]) {
    unpack_words<T>(load_words_again(stage + v * 2 * kPlace), x);
    unpack_words<T>(load_words_again(stage + v * 2 * kPlace + kPlace), grad);
  };
  // grad_y becomes g.
  const auto weigh = [&](int v, float (&grad)[kVector]) {
    float weight[kVector];
    unpack_words<T>(load_words_again(shared_weights + v * kLanes * 16), weight);
#pragma unroll
    for (int e = 0; e < kVector; ++e) grad[e] = __fmul_rn(grad[e], weight[e]);
  };
  float weight_sums[kVectors][kVector] = {};
  float bias_sums[kSums ? kVectors : 1][kVector] = {};
  const float per_column = 1.0f / static_cast<float>(kColumns * p.cluster);
  const auto of_lane = [](float value, int from) { return __shfl_sync(0xffffffffu, value, from); };
  // The sums of a turn over the team's warps: value i in lane i.
  const auto sum_of_warps = [&](uint32_t turn) {
    hopper::wait(mine.warps[turn & 3], turn >> 2 & 1);
    return sum_parts<kTeamWarps, kCount>(mine.of_warp[turn & 3]);
  };
  // Those of a turn's row, over the cluster.
  const auto sums_of_row = [&](uint32_t turn) -> float2 {
    if (p.cluster == 1) {
      const float all = sum_of_warps(turn);
      return {of_lane(all, 0), kSums ? of_lane(all, 1) : 0.0f};
    }
    hopper::wait(mine.ctas[turn & 3], turn >> 2 & 1);
    const float4 part = mine.of_cta[turn & 3][lane & (p.cluster - 1)];
    const int width = static_cast<int>(p.cluster);
    if constexpr (kSums) return sum_lanes<kMaxWarps>(float2{part.x, part.y}, width);
    return {sum_lanes<kMaxWarps>(part.x, width), 0.0f};
  };

  uint32_t turn = 0;
  int stage = 0;
  for (;; row += step) {
    // Behind the last row are zeros, which add nothing.
    const bool has_row = row < p.rows;
    float2 sums_before{};
    {
      hopper::wait_for_copy_groups<kStages - 2>();
      __syncwarp();
      const float rstd = mine.statistics[stage][warp][0];
      const float shift = kSums ? -mine.statistics[stage][warp][1] * rstd : 0.0f;
      float sums[kCount] = {};
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float xhat[kVector], grad[kVector];
        operands(places + stage * kStage, v, xhat, grad);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          if constexpr (kSums) bias_sums[v][e] += grad[e];
          xhat[e] = kSums ? fmaf(xhat[e], rstd, shift) : __fmul_rn(xhat[e], rstd);
          weight_sums[v][e] = fmaf(grad[e], xhat[e], weight_sums[v][e]);
        }
        weigh(v, grad);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          sums[0] = fmaf(grad[e], xhat[e], sums[0]);
          if constexpr (kSums) sums[kCount - 1] += grad[e];
        }
        // In front of pass 2 all warps would wait for the shuffles at once.
        if (v == kVectors / 2 - 1 && turn > 0) sums_before = sums_of_row(turn - 1);
      }
      const float each = sum_each<32>(sums);
      constexpr int kPart = 32 / kCount;
      if (lane % kPart == 0) mine.of_warp[turn & 3][warp * kCount + lane / kPart] = each;
      __syncwarp();
      if (lane == 0) hopper::arrive(mine.warps[turn & 3]);
    }
    if (turn > 0) {  // the row before
      const int stage_before = stage == 0 ? kStages - 1 : stage - 1;
      const uint32_t next = row + (kStages - 1) * step;
      const float rstd = mine.statistics[stage_before][warp][0];
      const float shift = kSums ? -mine.statistics[stage_before][warp][1] * rstd : 0.0f;
      // grad_x = g * rstd + x * slope + offset
      const float along = sums_before.x * per_column, sum = sums_before.y * per_column;
      const float slope = -along * rstd * rstd;
      float offset = 0.0f;
      if constexpr (kSums) {
        offset = -fmaf(along, shift, p.mean ? sum : 0.0f) * rstd;
      }
      const bool keeps_pace = p.lead > 0 && warp == kTeamWarps - 1;
      uint32_t turns_seen = 0;
      if (keeps_pace) {
        if (lane == 0) {
          turns_seen = keep_pace(p.turns, p.lead, rank == 0, turn, step, mine.turns_seen);
        }
        __syncwarp();
      }
      char* const to = p.grad_x + (uint64_t{row - step} * p.grad_x_bytes + begin);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float x[kVector], grad[kVector];
        operands(places + stage_before * kStage, v, x, grad);
        weigh(v, grad);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          grad[e] = kSums ? fmaf(grad[e], rstd, offset) : __fmul_rn(grad[e], rstd);
          grad[e] = fmaf(x[e], slope, grad[e]);
        }
        store_words(to + v * kLanes * 16, pack_words<T>(grad));
        load_vector(stage_before, next, v);
      }
      __syncwarp();  // all lanes have read the statistics
      end_load(stage_before, next);
      if (keeps_pace && lane == 0) mine.turns_seen = turns_seen;
    }
    if (!has_row) break;
    if (p.cluster > 1 && warp == 0) {
      const float all = sum_of_warps(turn);
      const float4 value{of_lane(all, 0), kSums ? of_lane(all, 1) : 0.0f, 0.0f, 0.0f};
      hopper::Barrier& ready = mine.ctas[turn & 3];
      if (lane == 0) hopper::arrive_expect_bytes(ready, sizeof(float4) * p.cluster);
      if (lane < p.cluster) {
        hopper::store_async_in_cluster(&mine.of_cta[turn & 3][rank], ready, lane, value);
      }
      __syncwarp();
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
    ++turn;
  }
  hopper::allow_next_kernel();

  // Other teams' sums, then the first's: partials of the CTA.
  hopper::wait_for_copy_groups<0>();
  if (p.evict_last) {
    each_row_back(row, step, p.rows, p.ordinary_from, [&](uint32_t read) {
#pragma unroll 1
      for (int v = 0; v < kVectors; ++v) {
        hopper::evict_as_others(p.x + (uint64_t{read} * p.x_bytes + begin) + v * kLanes * 16);
        hopper::evict_as_others(p.grad_y + (uint64_t{read} * p.grad_y_bytes + begin) +
                                v * kLanes * 16);
      }
    });
  }
  __syncthreads();  // all stages are read
  float4* const of_teams = reinterpret_cast<float4*>(shared_bytes);
  const auto place_of = [&](int set, int team, int v, int q) -> float4& {
    return of_teams[(((set * (kTeams - 1) + team - 1) * kVectors + v) * kQuads + q) * kLanes +
                    thread];
  };
  const auto sums_of = [&](int set, int v, int q) {
    const float* const from = kSums && set == 1 ? bias_sums[kSums ? v : 0] : weight_sums[v];
    return float4{from[4 * q], from[4 * q + 1], from[4 * q + 2], from[4 * q + 3]};
  };
  if (team > 0) {
#pragma unroll
    for (int i = 0; i < kCount * kVectors * kQuads; ++i) {
      const int set = i / (kVectors * kQuads), v = i / kQuads % kVectors, q = i % kQuads;
      place_of(set, team, v, q) = sums_of(set, v, q);
    }
  }
  if (kTeams > 1) __syncthreads();
  if (team == 0) {
#pragma unroll
    for (int i = 0; i < kCount * kVectors * kQuads; ++i) {
      const int set = i / (kVectors * kQuads), v = i / kQuads % kVectors, q = i % kQuads;
      float* const partials = set == 1 ? p.bias_partials : p.weight_partials;
      if (partials == nullptr) continue;
      float4 sum = sums_of(set, v, q);
#pragma unroll
      for (int t = 1; t < kTeams; ++t) {
        const float4 more = place_of(set, t, v, q);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      // Of the cluster's row of partials this CTA's columns.
      float4* const to = reinterpret_cast<float4*>(partials + int64_t{blockIdx.x} * kColumns);
      to[(v * kLanes + thread) * kQuads + q] = sum;
    }
  }
  if (p.cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
