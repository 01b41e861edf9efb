// The backward of whole, aligned rows of one type in a CTA, without rings: every thread copies what
// it will read itself into places of its own in shared memory, some turns ahead (cp.async). No
// thread waits for another but for the sums of a row, and all of a layout is known to the compiler:
// that halves the instructions an element of norm_backward_sm90, which bound it.
//
// A turn is a row of a team, or two, or those that a warp has side by side. Sums of a row are taken
// in the order of norm_backward_sm90, so grad_x has its bits.
#pragma once

#include "hopper/warp_group.cuh"
#include "kernels/norm/whole.cuh"

namespace ikbo::norm {

enum class TeamBarrier { kSums = 1 };  // one a team

// kSums: with sums of grad_y, as for a LayerNorm or a bias.
template <class T, int kLanes, int kVectors, bool kSums>
__global__ void __launch_bounds__(
    32 * norm_whole_layout(kLanes, kVectors, 16 / sizeof(T), kSums).warps, 1)
    norm_backward_whole_sm90(const __grid_constant__ WholeBackward p) {
  constexpr int kVector = 16 / sizeof(T), kQuads = kVector / 4;
  constexpr NormWhole kLayout = norm_whole_layout(kLanes, kVectors, kVector, kSums);
  constexpr int kRows = kLayout.rows, kWarps = kLayout.warps, kThreads = 32 * kWarps;
  constexpr int kStages = kLayout.stages, kTeams = kLayout.teams;
  constexpr bool kInWarp = kLanes <= 32;
  constexpr int kTeamWarps = kInWarp ? 1 : kLanes / 32;
  constexpr int kSideBySide = kInWarp ? 32 / kLanes : 1;
  constexpr int kTurnRows = kSideBySide * kRows;
  constexpr int kColumns = kLanes * kVectors * kVector;  // of the CTA
  constexpr int kCount = kSums ? 2 * kRows : kRows;      // sums of a turn
  // Registers hold the weight in float, or in T where there are more columns a thread; and sums of
  // grad_y, or there is a place for them in shared memory.
  constexpr bool kPacked = whole_packs_weight(kLanes, kVectors), kSlots = kLayout.has_slots();
  // A turn's statistics come with its rows, or by a load a turn ahead. And a stage is filled again
  // before the exchange of its row's sums, or last. Which is better was measured: up to a third
  // depends on it where a team has many warps, which all wait for one another.
  constexpr bool kLoadsStatistics = kLanes == 256 || (kTeamWarps == 16 && !kSums && kVectors != 3);
  constexpr bool kLate = kSums && !kInWarp && !kLoadsStatistics && kVectors != 3;
  static_assert(kTurnRows == kLayout.turn_rows() && kColumns == kLayout.cta_columns());
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ float of_warp[2][kTeams][kTeamWarps * kCount];
  // rstd, then mean, of a turn's rows: each warp's own.
  constexpr int kStatistics = kTurnRows * (kSums ? 2 : 1);
  __shared__ float statistics[kStages][kWarps][kStatistics];

  const int thread = threadIdx.x % kLanes, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int team = warp / kTeamWarps, mine = kInWarp ? lane / kLanes : 0;
  hopper::touch(p);
  hopper::wait_for_previous_kernel();

  // Blocks of a turn's rows are dealt out over CTAs first: of few blocks they have equal shares
  // where teams haven't.
  const uint32_t step = gridDim.x * (kTeams * kTurnRows);
  uint32_t first = (team * gridDim.x + blockIdx.x) * kTurnRows;
  const auto row_of = [&](uint32_t first, int r) { return first + r * kSideBySide + mine; };
  // Where this thread's first vector is in a row.
  const uint32_t begin = thread * 16;
  // Places of a stage: of row, vector and operand, each for all threads.
  constexpr int kPlace = 16 * kThreads, kStage = kLayout.stage_bytes();
  static_assert(kStage == kRows * kVectors * 2 * kPlace);
  const uint32_t places = hopper::shared_address(shared_bytes) + 16 * threadIdx.x;
  const auto load = [&](int stage, uint32_t first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t row = row_of(first, r);
      const int bytes = row < p.rows ? 16 : 0;
      const char* const x = p.x + (uint64_t{row} * p.x_bytes + begin);
      const char* const grad = p.grad_y + (uint64_t{row} * p.grad_y_bytes + begin);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t to = places + stage * kStage + (r * kVectors + v) * 2 * kPlace;
        hopper::copy_async_16_zero_filled(to, x + v * kLanes * 16, bytes);
        hopper::copy_async_16_zero_filled(to + kPlace, grad + v * kLanes * 16, bytes);
      }
    }
    if (!kLoadsStatistics && lane < kStatistics) {
      const float* const from = lane < kTurnRows ? p.rstd : p.mean;
      const uint32_t row = first + lane % kTurnRows;
      hopper::copy_async_4_or_zero(&statistics[stage][warp][lane], from + row,
                                   row < p.rows && from != nullptr);
    }
    hopper::end_copy_group();
  };
  // In lane r rstd of row r, and behind all of them the means.
  [[maybe_unused]] float next_statistic = 0.0f;
  const auto load_statistics = [&](uint32_t first) {
    const uint32_t row = first + lane % kRows;
    next_statistic = 0.0f;
    if (lane < kRows && row < p.rows) next_statistic = p.rstd[row];
    if (kSums && lane >= kRows && lane < 2 * kRows && p.mean && row < p.rows) {
      next_statistic = p.mean[row];
    }
  };
  float weight[kPacked ? 1 : kVectors][kVector];
  Words<4> packed_weight[kPacked ? kVectors : 1];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * kLanes + thread) * kVector;
    float values[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) values[e] = 1.0f;
    if constexpr (kPacked) {
      packed_weight[v] = pack_words<T>(values);
      if (p.weight) packed_weight[v] = load_words<4>(p.weight + column * sizeof(T));
    } else if (p.weight) {
      with_type<T>(p.weight_type, [&](auto zero) {
        using W = decltype(zero);
        unpack_words<W>(load_words<kWordsOf<W, kVector>>(p.weight + column * sizeof(W)), values);
      });
      if (p.weight_offset != 0.0f) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) values[e] += p.weight_offset;
      }
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) weight[kPacked ? 0 : v][e] = values[e];
  }
  // grad_y becomes g.
  const auto weigh = [&](int v, float (&grad)[kVector]) {
    float values[kVector];
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(packed_weight[v].word[i]));
      unpack_words<T>(packed_weight[v], values);
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      grad[e] = __fmul_rn(grad[e], kPacked ? values[e] : weight[kPacked ? 0 : v][e]);
    }
  };

  float weight_sums[kVectors][kVector] = {};
  float bias_sums[kSums && !kSlots ? kVectors : 1][kVector] = {};
  float4* const slots = reinterpret_cast<float4*>(shared_bytes + kLayout.slots_at());
  const auto slot = [&](int v, int q) -> float4& {
    return slots[(v * kQuads + q) * kThreads + threadIdx.x];
  };
  if constexpr (kSlots) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) slot(v, q) = {0.0f, 0.0f, 0.0f, 0.0f};
    }
  }
#pragma unroll 1  // unrolled, rows of 4096 columns took 2 % longer
  for (int s = 0; s < kStages; ++s) load(s, first + s * step);
  if constexpr (kLoadsStatistics) load_statistics(first);

  const float per_column = 1.0f / static_cast<float>(kColumns);
  uint32_t turn = 0;
  int stage = 0;
  for (; first < p.rows; first += step) {
    hopper::wait_for_copy_groups<kStages - 1>();
    __syncwarp();
    float rstd[kRows], mean[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = r * kSideBySide + mine;
      if constexpr (kLoadsStatistics) {
        rstd[r] = __shfl_sync(0xffffffffu, next_statistic, r);
        mean[r] = kSums ? __shfl_sync(0xffffffffu, next_statistic, kRows + r) : 0.0f;
      } else {
        rstd[r] = statistics[stage][warp][i];
        mean[r] = kSums ? statistics[stage][warp][kTurnRows + i] : 0.0f;
      }
    }
    if constexpr (kLoadsStatistics) load_statistics(first + step);

    const auto normalise = [&](float (&x)[kVector], int r) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        x[e] = kSums ? fmaf(x[e], rstd[r], -mean[r] * rstd[r]) : __fmul_rn(x[e], rstd[r]);
      }
    };
    // The sums over rows.
    const auto accumulate = [&](int v, const float (&xhat)[kVector], const float (&grad)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        if constexpr (kSums && !kSlots) bias_sums[v][e] += grad[e];
        weight_sums[v][e] = fmaf(grad[e], xhat[e], weight_sums[v][e]);
      }
      if constexpr (kSlots) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          float4 sum = slot(v, q);
          sum.x += grad[4 * q], sum.y += grad[4 * q + 1];
          sum.z += grad[4 * q + 2], sum.w += grad[4 * q + 3];
          slot(v, q) = sum;
        }
      }
    };
    Words<4> x_words[kRows][kVectors], grad_words[kRows][kVectors];
    float sums[kCount];  // of each row that of g * xhat and then, if there are, that of g
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float along = 0.0f, sum = 0.0f;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t from = places + stage * kStage + (r * kVectors + v) * 2 * kPlace;
        x_words[r][v] = load_words_again(from);
        grad_words[r][v] = load_words_again(from + kPlace);
        float xhat[kVector], grad[kVector];
        unpack_words<T>(x_words[r][v], xhat);
        unpack_words<T>(grad_words[r][v], grad);
        normalise(xhat, r);
        accumulate(v, xhat, grad);
        weigh(v, grad);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          along = fmaf(grad[e], xhat[e], along);
          if constexpr (kSums) sum += grad[e];
        }
      }
      sums[kSums ? 2 * r : r] = along;
      if constexpr (kSums) sums[2 * r + 1] = sum;
    }
    if constexpr (!kLate) {
      __syncwarp();  // all lanes have read the statistics
      load(stage, first + kStages * step);
    }

    constexpr int kSumLanes = kInWarp ? kLanes : 32, kPart = kSumLanes / kCount;
    const float each = sum_each<kSumLanes>(sums);
    if constexpr (kInWarp) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sums[i] = __shfl_sync(0xffffffffu, each, (lane & ~(kLanes - 1)) + i * kPart);
      }
    } else {
      const uint32_t buffer = turn & 1;
      float* const parts = of_warp[buffer][team];
      if (lane % kPart == 0) parts[thread / 32 * kCount + lane / kPart] = each;
      hopper::barrier_wait(hopper::numbered(TeamBarrier::kSums, team), kLanes);
      const float all = sum_parts<kTeamWarps, kCount>(parts);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] = __shfl_sync(0xffffffffu, all, i);
      ++turn;
    }

#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t row = row_of(first, r);
      // grad_x = g * rstd + x * slope + offset
      const float along = sums[kSums ? 2 * r : r] * per_column;
      const float slope = -along * rstd[r] * rstd[r];
      float offset = 0.0f;
      if constexpr (kSums) {
        const float sum = p.mean ? sums[2 * r + 1] * per_column : 0.0f;
        offset = -fmaf(along, -mean[r] * rstd[r], sum) * rstd[r];
      }
      char* const to = p.grad_x + (uint64_t{row} * p.grad_x_bytes + begin);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float x[kVector], grad[kVector];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          asm volatile("" : "+r"(x_words[r][v].word[i]), "+r"(grad_words[r][v].word[i]));
        }
        unpack_words<T>(x_words[r][v], x);
        unpack_words<T>(grad_words[r][v], grad);
        weigh(v, grad);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          grad[e] = kSums ? fmaf(grad[e], rstd[r], offset) : __fmul_rn(grad[e], rstd[r]);
          grad[e] = fmaf(x[e], slope, grad[e]);
        }
        const Words<4> words = pack_words<T>(grad);
        if (row < p.rows) {
          *reinterpret_cast<uint4*>(to + v * kLanes * 16) = {words.word[0], words.word[1],
                                                             words.word[2], words.word[3]};
        }
      }
    }
    if constexpr (kLate) {
      __syncwarp();  // all lanes have read the statistics
      load(stage, first + kStages * step);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  hopper::allow_next_kernel();

  // Each team's sums, then those of the CTA: its partials.
#pragma unroll
  for (int offset = 16; kInWarp && offset >= kLanes; offset /= 2) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        weight_sums[v][e] += __shfl_xor_sync(0xffffffffu, weight_sums[v][e], offset);
        if constexpr (kSums && !kSlots) {
          bias_sums[v][e] += __shfl_xor_sync(0xffffffffu, bias_sums[v][e], offset);
        }
      }
    }
  }
  hopper::wait_for_copy_groups<0>();
  __syncthreads();  // all stages are read
  constexpr int kColumnQuads = kColumns / 4;
  float4* const of_teams = reinterpret_cast<float4*>(shared_bytes);
  const auto put = [&](float4* to, const auto& sums) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        to[(v * kLanes + thread) * kQuads + q] = {sums[v][4 * q], sums[v][4 * q + 1],
                                                  sums[v][4 * q + 2], sums[v][4 * q + 3]};
      }
    }
  };
  if (mine == 0) {
    put(of_teams + team * kColumnQuads, weight_sums);
    if constexpr (kSums && !kSlots) put(of_teams + (kTeams + team) * kColumnQuads, bias_sums);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < (kSums ? 2 : 1) * kColumnQuads; i += kThreads) {
    const bool bias = i >= kColumnQuads;
    const int quad = bias ? i - kColumnQuads : i;
    float* const partials = bias ? p.bias_partials : p.weight_partials;
    if (partials == nullptr) continue;
    const auto of_team = [&](int t) {
      if (kSlots && bias) {
        const int vector = quad / kQuads, q = quad % kQuads;
        return slots[(vector / kLanes * kQuads + q) * kThreads + t * kLanes + vector % kLanes];
      }
      return of_teams[((bias ? kTeams : 0) + t) * kColumnQuads + quad];
    };
    float4 sum = of_team(0);
#pragma unroll
    for (int t = 1; t < kTeams; ++t) {
      const float4 more = of_team(t);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    reinterpret_cast<float4*>(partials)[blockIdx.x * kColumnQuads + quad] = sum;
  }
}

}  // namespace ikbo::norm
