// The forward of whole aligned rows in clusters, with a weight and, beside means, a bias, all of
// one type. A CTA has two teams of threads with rows of their own. Every thread copies what it will
// read itself, so no barrier of the CTA is needed; and a team takes the sums of the row ahead
// before it finishes a row: while they go over its warps and the cluster's CTAs it has work. Rows
// are read from their stage in each pass, and registers hold weight and bias.
//
//   of a row  warps:   wait for its copies, sums -> of_warp, arrive warps[b]
//             warp 0:  wait warps[b], merge, st.async to the cluster's CTAs, on ctas[b]
//             warps:   (sums of the row ahead) wait ctas[b], merge, y; copy a later row
//
// Sums are added in the order of ForwardRow, so the bits are the same.
#pragma once

#include "kernels/norm/forward_row.cuh"
#include "kernels/norm/pace.cuh"

namespace ikbo::norm {

inline constexpr int kWideTeams = NormConfig::kWideTeams, kWideStages = NormConfig::kWideStages;

// A team's. Its warps are within two rows of one another, and so are a cluster's CTAs: four
// buffers.
struct WideForwardExchange {
  float4 of_warp[4][kMaxWarps];
  float4 of_cta[4][NormMapping::kMaxCluster];
  hopper::Barrier warps[4], ctas[4];
  uint32_t turns_seen;  // of all teams, a turn ago
};

// More than a turn ahead of the average, a team waits. That is worth 2 to 6 %; two turns 1 to 4 %.
inline constexpr uint32_t kWideLead = 1;

template <class T, int kVectors, bool kLayer>
__global__ void __launch_bounds__(32 * kMaxWarps * kWideTeams, 1)
    norm_forward_wide_sm90(const __grid_constant__ NormForward p,
                           const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  extern __shared__ __align__(16) char shared_bytes[];
  __shared__ WideForwardExchange shared[kWideTeams];
  const NormMapping& m = config.mapping;
  const int lane = threadIdx.x % 32;
  const int team = static_cast<int>(threadIdx.x) >= m.lanes;
  const int thread = threadIdx.x - team * m.lanes, warp = thread / 32;
  const int cluster = m.cluster;
  const uint32_t rank = hopper::cluster_cta_rank();
  WideForwardExchange& mine = shared[team];
  if (thread == 0) {
    mine.turns_seen = 0;
    for (int i = 0; i < 4; ++i) {
      hopper::init(mine.warps[i], m.warps);
      hopper::init(mine.ctas[i], 1);
    }
    hopper::fence_barrier_init();
  }
  begin(p, config);
  hopper::allow_next_kernel();

  // Vectors lie `step` bytes from one another, from the first byte of a row that is the thread's.
  const int step = 16 * m.lanes;
  const int first = (rank * kVectors * m.lanes + thread) * 16;
  const uint32_t places =
      hopper::shared_address(shared_bytes) + team * kWideStages * kVectors * step + thread * 16;
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  const auto of_row = [&](const NormMatrix& m, uint32_t row) {
    return static_cast<char*>(m.data) + row * m.row_bytes + first;
  };
  // A step of which ptxas doesn't know that all threads have the same: it would be in a uniform
  // register, and of such a copy ptxas 13.0 makes an illegal instruction.
  uint32_t lower_lanes;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(lower_lanes));
  const int copy_step = step + (lower_lanes >> 31);
  const auto load_vector = [&](int stage, const char* from, uint32_t row, int v) {
    hopper::copy_async_16_zero_filled(places + (stage * kVectors + v) * copy_step, from,
                                      row < rows ? 16 : 0,
                                      hopper::evict_last_if(config.evict_last));
  };
  const uint32_t row_step = config.owners * kWideTeams;
  uint32_t row = hopper::cluster_index() * kWideTeams + team;
#pragma unroll
  for (int s = 0; s < kWideStages; ++s) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      load_vector(s, of_row(p.x, row + s * row_step) + v * step, row + s * row_step, v);
    }
    hopper::end_copy_group();
  }
  Words<4> weight[kVectors], bias[kLayer ? kVectors : 1];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    weight[v] = load_words<4>(static_cast<const char*>(p.weight.data) + first + v * step);
    if constexpr (kLayer) {
      bias[v] = load_words<4>(static_cast<const char*>(p.bias.data) + first + v * step);
    }
  }
  hopper::cluster_sync();

  const auto values_of = [&](int stage, int v, float (&values)[kVector]) {
    unpack_words<T>(load_words_again(places + (stage * kVectors + v) * step), values);
  };
  // As sum_of_elements().
  const auto sum_over = [&](int stage, const auto& add) {
    float sums[4] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float values[kVector];
      values_of(stage, v, values);
#pragma unroll
      for (int e = 0; e < kVector; ++e) sums[e % 4] = add(values[e], sums[e % 4]);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  };
  constexpr float kPartColumns = 32.0f * kVectors * kVector;  // of a warp
  const Moments merge{kLayer, false, config.per_cta_column, config.per_column};
  const int width = 1 << (32 - __clz(m.warps - 1));
  float part_mean = 0.0f;  // of the row before, of this warp's columns
  int stage = 0;
#pragma unroll 1
  for (uint32_t turn = 0;; ++turn, row += row_step) {
    const bool has_row = row < rows;
    const uint32_t b = turn & 3, phase = turn >> 2 & 1;
    float mean = 0.0f;
    if (has_row) {
      hopper::wait_for_copy_groups<kWideStages - 2>();
      float sum = 0.0f;
      if constexpr (kLayer) {
        sum = sum_lanes(sum_over(stage, [](float value, float sum) { return sum + value; }), 32);
        mean = __fmul_rn(sum, 1.0f / kPartColumns);
      }
      float squares = sum_over(stage, [&](float value, float sum) {
        const float away = kLayer ? value - mean : value;
        return fmaf(away, away, sum);
      });
      squares = sum_lanes(squares, 32);
      if (lane == 0) {
        mine.of_warp[b][warp] = float4{sum, squares, kPartColumns, mean};
        hopper::arrive(mine.warps[b]);
      }
      __syncwarp();
    }
    if (turn > 0) {  // the row before
      const uint32_t before = turn - 1;
      const int stage_before = stage == 0 ? kWideStages - 1 : stage - 1;
      hopper::wait(mine.ctas[before & 3], before >> 2 & 1);
      const float4 all = merge(mine.of_cta[before & 3][lane & (cluster - 1)], cluster, true);
      const float rstd = rsqrtf(fmaf(all.y, config.per_column, p.eps));
      const uint32_t row_before = row - row_step;
      if (thread == 0 && rank == 0) {
        if (kLayer && p.mean) p.mean[row_before] = all.w;
        if (p.rstd) p.rstd[row_before] = rstd;
      }
      const float shift = kLayer ? (part_mean - all.w) * rstd : 0.0f;
      const uint32_t next = row + (kWideStages - 1) * row_step;
      const bool keeps_pace = config.paced && warp == m.warps - 1;
      if (keeps_pace) {
        if (lane == 0) {
          mine.turns_seen =
              keep_pace(p.counter, kWideLead, rank == 0, turn, row_step, mine.turns_seen);
        }
        __syncwarp();
      }
      char* to = of_row(p.y, row_before);
      const char* from = of_row(p.x, next);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float values[kVector], w[kVector], b[kVector];
        values_of(stage_before, v, values);
        // Unpacked here each time, and not before the loop.
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(weight[v].word[i]));
        unpack_words<T>(weight[v], w);
        if constexpr (kLayer) {
#pragma unroll
          for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(bias[v].word[i]));
          unpack_words<T>(bias[v], b);
        }
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          if constexpr (kLayer) values[e] -= part_mean;
          values[e] = fmaf(values[e], rstd, shift);
          values[e] = kLayer ? fmaf(values[e], w[e], b[e]) : __fmul_rn(values[e], w[e]);
        }
        store_words(to, pack_words<T>(values));
        load_vector(stage_before, from, next, v);
        to += step, from += step;
        asm volatile("" : "+l"(to), "+l"(from));
      }
      hopper::end_copy_group();
    }
    if (!has_row) break;
    part_mean = mean;
    if (warp == 0) {
      hopper::wait(mine.warps[b], phase);
      const int peer = lane & (width - 1);
      const float4 nothing{0.0f, 0.0f, 0.0f, 0.0f};
      const float4 all = merge(peer < m.warps ? mine.of_warp[b][peer] : nothing, width, false);
      if (lane == 0) hopper::arrive_expect_bytes(mine.ctas[b], sizeof(float4) * cluster);
      if (lane < cluster) {
        hopper::store_async_in_cluster(&mine.of_cta[b][rank], mine.ctas[b], lane, all);
      }
      __syncwarp();
    }
    stage = stage == kWideStages - 1 ? 0 : stage + 1;
  }
  hopper::wait_for_copy_groups<0>();
  if (config.evict_last) {
    each_row_back(row, row_step, rows, config.ordinary_from, [&](uint32_t read) {
#pragma unroll 1
      for (int v = 0; v < kVectors; ++v) hopper::evict_as_others(of_row(p.x, read) + v * step);
    });
  }
  hopper::cluster_sync();
}

}  // namespace ikbo::norm
