// The forward of whole aligned rows in clusters, without a mean: x, y and a weight of one type. A
// CTA has two teams of threads with rows of their own. Every thread copies what it will read
// itself, so no barrier of the CTA is needed; and a team takes the sum of the row ahead before it
// finishes a row: while it goes over the team's warps and the cluster's CTAs there is work. Rows
// are read from their stage twice, and registers hold the weight.
//
// Sums are added in the order of ForwardRow, so the bits are the same. (With means the passes over
// shared memory are three, and registers hold a bias, too: 1 % faster than overlapped rows in
// clusters of two, up to 5 % slower in others.)
#pragma once

#include "kernels/norm/forward_row.cuh"

namespace ikbo::norm {

inline constexpr int kWideTeams = NormConfig::kWideTeams, kWideStages = NormConfig::kWideStages;

// A team's. Its warps are within two rows of one another, and so are a cluster's CTAs: four
// buffers.
struct WideExchange {
  float of_warp[4][kMaxWarps];
  float4 of_cta[4][NormMapping::kMaxCluster];  // the sum is the first
  hopper::Barrier warps[4], ctas[4];
};

template <class T, int kVectors>
__global__ void __launch_bounds__(32 * kMaxWarps * kWideTeams, 1)
    norm_forward_wide_sm90(const __grid_constant__ NormForward p,
                           const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  extern __shared__ __align__(16) char shared_bytes[];
  __shared__ WideExchange shared[kWideTeams];
  const NormMapping& m = config.mapping;
  const int lane = threadIdx.x % 32;
  const int team = static_cast<int>(threadIdx.x) >= m.lanes;
  const int thread = threadIdx.x - team * m.lanes, warp = thread / 32;
  const int cluster = m.cluster;
  const uint32_t rank = hopper::cluster_cta_rank();
  WideExchange& mine = shared[team];
  if (thread == 0) {
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
  // Behind the last row nothing is read.
  const auto load_vector = [&](int stage, const char* from, uint32_t row, int v) {
    hopper::copy_async_16_zero_filled(places + (stage * kVectors + v) * step, from,
                                      row < rows ? 16 : 0);
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
  Words<4> weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) weight[v] = load_words<4>(of_row(p.weight, 0) + v * step);
  hopper::cluster_sync();

  const auto values_of = [&](int stage, int v, float (&values)[kVector]) {
    unpack_words<T>(load_words_again(places + (stage * kVectors + v) * step), values);
  };
  const int width = 1 << (32 - __clz(m.warps - 1));
  int stage = 0;
#pragma unroll 1
  for (uint32_t turn = 0;; ++turn, row += row_step) {
    const bool has_row = row < rows;
    const uint32_t b = turn & 3, phase = turn >> 2 & 1;
    if (has_row) {
      hopper::wait_for_copy_groups<kWideStages - 2>();
      float sums[4] = {};  // as sum_of_elements()
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float values[kVector];
        values_of(stage, v, values);
#pragma unroll
        for (int e = 0; e < kVector; ++e) sums[e % 4] = fmaf(values[e], values[e], sums[e % 4]);
      }
      const float squares = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]), 32);
      if (lane == 0) {
        mine.of_warp[b][warp] = squares;
        hopper::arrive(mine.warps[b]);
      }
      __syncwarp();
    }
    if (turn > 0) {  // the row before
      const uint32_t before = turn - 1, row_before = row - row_step;
      const uint32_t next = row + (kWideStages - 1) * row_step;
      const int stage_before = stage == 0 ? kWideStages - 1 : stage - 1;
      hopper::wait(mine.ctas[before & 3], before >> 2 & 1);
      const float squares =
          sum_lanes<kMaxWarps>(mine.of_cta[before & 3][lane & (cluster - 1)].x, cluster);
      const float rstd = rsqrtf(fmaf(squares, config.per_column, p.eps));
      if (p.rstd && thread == 0 && rank == 0) p.rstd[row_before] = rstd;
      char* to = of_row(p.y, row_before);
      const char* from = of_row(p.x, next);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float values[kVector], w[kVector];
        values_of(stage_before, v, values);
        // Unpacked here each time, and not before the loop.
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(weight[v].word[i]));
        unpack_words<T>(weight[v], w);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          values[e] = __fmul_rn(fmaf(values[e], rstd, 0.0f), w[e]);  // a zero loses its sign
        }
        store_words(to, pack_words<T>(values));
        load_vector(stage_before, from, next, v);
        to += step, from += step;
        asm volatile("" : "+l"(to), "+l"(from));  // one address at a time
      }
      hopper::end_copy_group();
    }
    if (!has_row) break;
    if (warp == 0) {
      hopper::wait(mine.warps[b], phase);
      const int peer = lane & (width - 1);
      const float sum = sum_lanes<kMaxWarps>(peer < m.warps ? mine.of_warp[b][peer] : 0.0f, width);
      if (lane == 0) hopper::arrive_expect_bytes(mine.ctas[b], sizeof(float4) * cluster);
      if (lane < cluster) {
        hopper::store_async_in_cluster(&mine.of_cta[b][rank], mine.ctas[b], lane,
                                       {sum, 0.0f, 0.0f, 0.0f});
      }
      __syncwarp();
    }
    stage = stage == kWideStages - 1 ? 0 : stage + 1;
  }
  hopper::wait_for_copy_groups<0>();
  hopper::cluster_sync();
}

}  // namespace ikbo::norm
