// The backward of whole, aligned rows of one type over many warps, and over clusters of CTAs. As in
// norm_backward_direct_sm90 every thread copies what it will read itself. A team takes the sums of
// the row ahead before it finishes a row: while they go over its warps and the cluster's CTAs it
// has work, and no barrier of the CTA is left.
//
// Sums of a row are taken in the order of norm_backward_sm90, so grad_x has its bits.
#pragma once

#include "kernels/norm/backward_direct_sm90.cuh"

namespace ikbo::norm {

struct WideBackward : DirectBackward {
  int64_t first_columns;  // from CTA to CTA of a cluster
};

// A team's exchange. Its warps are within two rows of one another, and so are a cluster's CTAs:
// four buffers.
template <int kTeamWarps, int kCount, int kStages>
struct WideExchange {
  float of_warp[4][kTeamWarps * kCount];
  float4 of_cta[4][NormMapping::kMaxCluster];
  hopper::Barrier warps[4], ctas[4];
  float statistics[kStages][kTeamWarps][2];  // rstd and mean: each warp's own
  uint32_t turns_seen;  // of the thread that keeps pace
};

// kTeamWarps: of a CTA's sixteen, that have a row.
template <class T, int kVectors, int kTeamWarps, int kTeams, int kStages, bool kSums>
__global__ void __launch_bounds__(32 * kTeamWarps * kTeams, 1)
    norm_backward_wide_sm90(const __grid_constant__ WideBackward p) {
  constexpr int kVector = 16 / sizeof(T), kLanes = 32 * kTeamWarps, kThreads = kLanes * kTeams;
  constexpr int kColumns = kLanes * kVectors * kVector;  // of the CTA
  constexpr int kCount = kSums ? 2 : 1;
  extern __shared__ __align__(16) char shared_bytes[];
  __shared__ WideExchange<kTeamWarps, kCount, kStages> shared[kTeams];

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
  if (p.apart) hopper::allow_next_kernel();

  const int64_t first_column = rank * p.first_columns;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes)) +
                        threadIdx.x * 16;
  constexpr int kPlace = kThreads * 16, kStage = kVectors * 2 * kPlace;
  // Where this thread's first vector is in a row.
  const uint32_t begin = static_cast<uint32_t>(first_column) * sizeof(T) + thread * 16;
  const auto load_vector = [&](int s, uint32_t row, int v) {
    const uint32_t to = ring + s * kStage + v * 2 * kPlace;
    const int bytes = row < p.rows ? 16 : 0;
    hopper::copy_async_16_zero_filled(
        to, p.x + (uint64_t{row} * p.x_bytes + begin) + v * kLanes * 16, bytes);
    hopper::copy_async_16_zero_filled(
        to + kPlace, p.grad_y + (uint64_t{row} * p.grad_y_bytes + begin) + v * kLanes * 16, bytes);
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
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load_vector(s, row + s * step, v);
    end_load(s, row + s * step);
  }

  // Weights, in T: all teams read the same.
  char* const weights = shared_bytes + kStages * kStage + thread * 16;
  if (team == 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float ones[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) ones[e] = 1.0f;
      Words<4> words = pack_words<T>(ones);
      if (p.weight) {
        words = load_words<4>(p.weight + (first_column + (v * kLanes + thread) * kVector) *
                                             static_cast<int>(sizeof(T)));
      }
      *reinterpret_cast<uint4*>(weights + v * kLanes * 16) = {words.word[0], words.word[1],
                                                              words.word[2], words.word[3]};
    }
  }
  if (p.cluster > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }

  const uint32_t shared_weights = static_cast<uint32_t>(__cvta_generic_to_shared(weights));
  const auto read = [](uint32_t from) {
    Words<4> words;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.word[0]), "=r"(words.word[1]), "=r"(words.word[2]),
                   "=r"(words.word[3])
                 : "r"(from));
    return words;
  };
  float weight_sums[kVectors][kVector] = {};
  float bias_sums[kSums ? kVectors : 1][kVector] = {};
  const float per_column = 1.0f / static_cast<float>(kColumns * p.cluster);
  const auto operands = [&](uint32_t slot, int v, float (&x)[kVector], float (&grad)[kVector]) {
    unpack_words<T>(read(slot + v * 2 * kPlace), x);
    unpack_words<T>(read(slot + v * 2 * kPlace + kPlace), grad);
  };
  const auto weigh = [&](int v, float (&grad)[kVector]) {
    float weight[kVector];
    unpack_words<T>(read(shared_weights + v * kLanes * 16), weight);
#pragma unroll
    for (int e = 0; e < kVector; ++e) grad[e] = __fmul_rn(grad[e], weight[e]);
  };

  uint32_t turn = 0;
  int stage = 0;
  // Which CTAs have what rows doesn't change: who is ahead of the average of all waits, but not for
  // CTAs that may not be on the GPU yet.
  const auto keep_pace = [&] {
    constexpr uint32_t kNoWait = ~0u;
    if (rank == 0) hopper::add_relaxed_gpu(p.turns, 1);
    uint32_t seen = mine.turns_seen;
    if (seen == kNoWait) return;
    const uint32_t least = turn > p.lead ? (turn - p.lead) * step : 0;
    for (int tries = 0; seen < least; ++tries) {
      seen = tries < 100 ? hopper::load_relaxed_gpu(p.turns) : kNoWait;
    }
    mine.turns_seen = seen == kNoWait ? kNoWait : hopper::load_relaxed_gpu(p.turns);
  };
  // The sums of turn t over the team's warps: value i in lane i.
  const auto sum_of_warps = [&](uint32_t t) {
    constexpr int kAll = kTeamWarps * kCount;
    hopper::wait(mine.warps[t & 3], t >> 2 & 1);
    const float* const parts = mine.of_warp[t & 3];
    float sum = kAll >= 32 || lane < kAll ? parts[lane] : 0.0f;
    constexpr int kWidth = kAll <= 8 ? 8 : kAll <= 16 ? 16 : 32;
#pragma unroll
    for (int offset = kWidth / 2; offset >= kCount; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    return sum;
  };
  const auto of_lane = [](float value, int from) {
    return __shfl_sync(0xffffffffu, value, from);
  };

  for (;; row += step) {
    const bool has_row = row < p.rows;
    // Behind the last row are zeros, which add nothing.
    hopper::wait_for_copy_groups<kStages - 2>();
    __syncwarp();
    const uint32_t slot = ring + stage * kStage;
    const float row_rstd = mine.statistics[stage][warp][0];
    const float row_mean = kSums ? mine.statistics[stage][warp][1] : 0.0f;
    float sums[kCount] = {};
    const float shift = -row_mean * row_rstd;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float xhat[kVector], grad[kVector];
      operands(slot, v, xhat, grad);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        if constexpr (kSums) bias_sums[v][e] += grad[e];
        xhat[e] = kSums ? fmaf(xhat[e], row_rstd, shift) : __fmul_rn(xhat[e], row_rstd);
        weight_sums[v][e] = fmaf(grad[e], xhat[e], weight_sums[v][e]);
      }
      weigh(v, grad);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        sums[0] = fmaf(grad[e], xhat[e], sums[0]);
        if constexpr (kSums) sums[kCount - 1] += grad[e];
      }
    }
    const float each = sum_each_of<32>(sums);
    constexpr int kPart = 32 / kCount;
    if (lane % kPart == 0) mine.of_warp[turn & 3][warp * kCount + lane / kPart] = each;
    __syncwarp();
    if (lane == 0) hopper::arrive(mine.warps[turn & 3]);
    if (turn > 0) {
      const uint32_t before = turn - 1;
      const int stage_before = stage == 0 ? kStages - 1 : stage - 1;
      const uint32_t behind = ring + stage_before * kStage;
      const float rstd = mine.statistics[stage_before][warp][0];
      const float mean = kSums ? mine.statistics[stage_before][warp][1] : 0.0f;
      float along, sum = 0.0f;
      if (p.cluster == 1) {
        const float all = sum_of_warps(before);
        along = of_lane(all, 0);
        if constexpr (kSums) sum = of_lane(all, 1);
      } else {
        hopper::wait(mine.ctas[before & 3], before >> 2 & 1);
        const float4 part = mine.of_cta[before & 3][lane & (p.cluster - 1)];
        along = part.x, sum = part.y;
        const int cluster = static_cast<int>(p.cluster);
        if constexpr (kSums) {
          const float2 both = sum_lanes<kMaxWarps>(float2{along, sum}, cluster);
          along = both.x, sum = both.y;
        } else {
          along = sum_lanes<kMaxWarps>(along, cluster);
        }
      }
      along *= per_column;
      const float slope = -along * rstd * rstd;
      float offset = 0.0f;
      if constexpr (kSums) {
        offset = -fmaf(along, -mean * rstd, p.mean ? sum * per_column : 0.0f) * rstd;
      }
      char* const to = p.grad_x + (uint64_t{row - step} * p.grad_x_bytes + begin);
      if (p.lead > 0 && warp == kTeamWarps - 1) {
        if (lane == 0) keep_pace();
        __syncwarp();
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float x[kVector], grad[kVector];
        operands(behind, v, x, grad);
        weigh(v, grad);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          grad[e] = kSums ? fmaf(grad[e], rstd, offset) : __fmul_rn(grad[e], rstd);
          grad[e] = fmaf(x[e], slope, grad[e]);
        }
        store_words(to + v * kLanes * 16, pack_words<T>(grad));
        load_vector(stage_before, row + (kStages - 1) * step, v);
      }
      __syncwarp();  // all lanes have read the statistics
      end_load(stage_before, row + (kStages - 1) * step);
    }
    if (!has_row) break;
    if (p.cluster > 1 && warp == 0) {
      const float all = sum_of_warps(turn);
      float4 value{of_lane(all, 0), kSums ? of_lane(all, 1) : 0.0f, 0.0f, 0.0f};
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
  __syncthreads();
  float4* const of_team = reinterpret_cast<float4*>(shared_bytes);
  constexpr int kQuads = kVector / 4;
  constexpr int kSets = kSums ? 2 : 1;
  const auto place_of = [&](int set, int of, int v, int q) -> float4& {
    return of_team[(((set * (kTeams - 1) + of - 1) * kVectors + v) * kQuads + q) * kLanes + thread];
  };
  if (team > 0) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          const float* const from = (kSums && set == 1 ? bias_sums[kSums ? v : 0] : weight_sums[v]);
          place_of(set, team, v, q) = {from[4 * q], from[4 * q + 1], from[4 * q + 2],
                                       from[4 * q + 3]};
        }
      }
    }
  }
  if (kTeams > 1) __syncthreads();
  if (team == 0) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float* const partials = set == 1 ? p.bias_partials : p.weight_partials;
      if (partials == nullptr) continue;
      // Of the cluster's row of partials this CTA's columns.
      float4* const to = reinterpret_cast<float4*>(partials + blockIdx.x * p.first_columns);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          const float* const from = (kSums && set == 1 ? bias_sums[kSums ? v : 0] : weight_sums[v]);
          float4 sum{from[4 * q], from[4 * q + 1], from[4 * q + 2], from[4 * q + 3]};
#pragma unroll
          for (int t = 1; t < kTeams; ++t) {
            const float4 more = place_of(set, t, v, q);
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
          }
          to[(v * kLanes + thread) * kQuads + q] = sum;
        }
      }
    }
  }
  if (p.cluster > 1) hopper::cluster_sync();
}

template <class T, int kVectors, int kTeamWarps, int kTeams, int kStages>
constexpr int wide_backward_bytes() {
  return kStages * kVectors * 2 * 32 * kTeamWarps * kTeams * 16 + kVectors * 32 * kTeamWarps * 16;
}

}  // namespace ikbo::norm
