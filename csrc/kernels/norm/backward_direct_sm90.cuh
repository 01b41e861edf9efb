// The backward of whole, aligned rows of one type within a warp or a CTA's team of warps. Every
// thread copies what it will read itself into places of its own in shared memory, some turns ahead
// (cp.async): no barrier, no thread waits for another but for the sums of a row.
//
// Sums of a row are taken in the order of norm_backward_sm90, so grad_x has its bits.
#pragma once

#include "hopper/async_copy.cuh"
#include "hopper/dependent_launch.cuh"
#include "hopper/warp_group.cuh"
#include "kernels/norm/compiled.h"
#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

// Of NormBackward what is read.
struct DirectBackward {
  const char *x, *grad_y;
  char* grad_x;
  const float *mean, *rstd;  // mean: LayerNorm only
  const char* weight;
  float *weight_partials, *bias_partials;
  uint32_t x_bytes, grad_y_bytes, grad_x_bytes;  // from row to row
  uint32_t rows, cluster;
  float weight_offset;
  ElementType weight_type;
  bool apart;  // sums over rows are another kernel's
  uint32_t lead;    // turns that a CTA may be ahead of the average; 0: any
  uint32_t* turns;  // a word, where there is a lead
};

using DirectBackwardKernel = void (*)(DirectBackward);

// The sums of kCount values, a power of two, over kLanes lanes. Lanes hand on what others add up:
// value i is then in the i-th of kCount equal parts of the lanes. In the order of sum_lanes.
template <int kLanes, int kCount>
__device__ inline float sum_each_of(float (&values)[kCount]) {
  const int lane = threadIdx.x % 32;
  int offset = kLanes / 2;
#pragma unroll
  for (int half = kCount / 2; half >= 1; half /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float own = upper ? values[i + half] : values[i];
      const float other = upper ? values[i] : values[i + half];
      values[i] = own + __shfl_xor_sync(0xffffffffu, other, offset);
    }
    offset /= 2;
  }
#pragma unroll
  for (; offset >= 1; offset /= 2) values[0] += __shfl_xor_sync(0xffffffffu, values[0], offset);
  return values[0];
}

// kRows: rows that a lane works on side by side. kSums: with sums of grad_y, as for a LayerNorm or
// a bias. kWarps: of a CTA, one an SM. kHold: x and grad_y wait packed in registers for their row's
// sums, else they are read again.
template <class T, int kLanes, int kVectors, int kRows, int kWarps, int kStages, bool kSums,
          bool kHold, bool kPacked, bool kClusters = false, bool kSlots = false,
          bool kLoads = false, bool kLate = false>
__global__ void __launch_bounds__(32 * kWarps, 1)
    norm_backward_direct_sm90(const __grid_constant__ DirectBackward p) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr bool kInWarp = kLanes <= 32;
  constexpr int kTeamWarps = kInWarp ? 1 : kLanes / 32;
  constexpr int kTeams = kWarps / kTeamWarps;
  constexpr int kSideBySide = kInWarp ? 32 / kLanes : 1;
  constexpr int kTurnRows = kSideBySide * kRows;
  constexpr int kColumns = kLanes * kVectors * kVector;
  constexpr int kCount = kSums ? 2 * kRows : kRows;
  constexpr float kPerColumn = 1.0f / static_cast<float>(kColumns);
  extern __shared__ __align__(16) char shared_bytes[];
  __shared__ float of_warp[2][kTeams][kTeamWarps * kCount];
  // rstd, then mean, of a turn's rows: each warp's own.
  constexpr int kStatistics = kTurnRows * (kSums ? 2 : 1);
  __shared__ float statistics[kStages][kWarps][kStatistics];
  __shared__ float4 of_cta[kClusters ? 2 : 1][kTeams][kClusters ? NormMapping::kMaxCluster : 1];
  __shared__ uint32_t turns_seen[kTeams];
  __shared__ hopper::Barrier ready[kClusters ? 2 : 1][kTeams];

  const int thread = threadIdx.x % kLanes, lane = threadIdx.x % 32;
  const int team = threadIdx.x / (32 * kTeamWarps);
  const int mine = kInWarp ? lane / kLanes : 0;
  const uint32_t cluster = kClusters ? p.cluster : 1;
  const uint32_t rank = kClusters && cluster > 1 ? hopper::cluster_cta_rank() : 0;
  const uint32_t clusters = gridDim.x / cluster, index = blockIdx.x / cluster;
  const uint32_t first_column = rank * kColumns;
  if (kClusters && threadIdx.x < kTeams) turns_seen[threadIdx.x] = 0;
  if (kClusters && threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kTeams; ++i) hopper::init(ready[0][i], 1), hopper::init(ready[1][i], 1);
    hopper::fence_barrier_init();
  }
  hopper::touch(p);
  hopper::wait_for_previous_kernel();
  if (p.apart) hopper::allow_next_kernel();

  // Packed: of T, without an offset.
  float weight[kPacked ? 1 : kVectors][kVector];
  Words<4> packed_weight[kPacked ? kVectors : 1];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = first_column + (v * kLanes + thread) * kVector;
    float values[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) values[e] = 1.0f;
    if constexpr (kPacked) {
      packed_weight[v] = pack_words<T>(values);
      if (p.weight) packed_weight[v] = load_words<4>(p.weight + first * sizeof(T));
    } else {
      if (p.weight) {
        with_type<T>(p.weight_type, [&](auto zero) {
          using W = decltype(zero);
          unpack_words<W>(load_words<kWordsOf<W, kVector>>(p.weight + first * sizeof(W)), values);
        });
      }
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        weight[v][e] = p.weight && p.weight_offset != 0.0f ? values[e] + p.weight_offset : values[e];
      }
    }
  }
  const auto weigh = [&](int v, float (&grad)[kVector]) {
    float values[kVector];
    if constexpr (kPacked) {
      if constexpr (true) {
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(packed_weight[v].word[i]));
      }
      unpack_words<T>(packed_weight[v], values);
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      grad[e] = __fmul_rn(grad[e], kPacked ? values[e] : weight[kPacked ? 0 : v][e]);
    }
  };
  float weight_sums[kVectors][kVector] = {};
  float bias_sums[kSums && !kSlots ? kVectors : 1][kVector] = {};

  // Blocks of a turn's rows are dealt out over CTAs first: of few blocks they have equal shares
  // where teams haven't.
  const uint32_t step = clusters * (kTeams * kTurnRows);
  uint32_t first = (team * clusters + index) * kTurnRows;
  // This thread's first vector in a row.
  const uint32_t begin = first_column * sizeof(T) + thread * 16;
  uint32_t turns = 0;
  const auto row_of = [&](uint32_t first, int r) { return first + r * kSideBySide + mine; };
  // A place: of stage, row, vector and operand, of each thread.
  constexpr int kPlace = 32 * kWarps * 16, kStage = kRows * kVectors * 2 * kPlace;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes)) + threadIdx.x * 16;
  constexpr int kSlotPlace = kStages * kStage;
  const auto slot_of_bias = [&](int v, int q) -> float4& {
    return reinterpret_cast<float4*>(shared_bytes + kSlotPlace)[(v * (kVector / 4) + q) * 32 *
                                                                    kWarps + threadIdx.x];
  };
  if constexpr (kSlots) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int q = 0; q < kVector / 4; ++q) slot_of_bias(v, q) = {0.0f, 0.0f, 0.0f, 0.0f};
    }
  }
  const int warp = threadIdx.x / 32;
  const auto load_statistics = [&](int stage, uint32_t first) {
    if (lane >= kStatistics) return;
    const float* const from = lane < kTurnRows ? p.rstd : p.mean;
    const uint32_t row = first + lane % kTurnRows;
    hopper::copy_async_4_or_zero(&statistics[stage][warp][lane], from + row,
                                 row < p.rows && from != nullptr);
  };
  // Value lane % kRows of rstd or, further on, of mean.
  [[maybe_unused]] float next_statistic = 0.0f;
  const auto load_next_statistic = [&](uint32_t first) {
    const uint32_t row = first + lane % kRows;
    next_statistic = 0.0f;
    if (lane < kRows && row < p.rows) next_statistic = p.rstd[row];
    if (kSums && lane >= kRows && lane < 2 * kRows && p.mean && row < p.rows) {
      next_statistic = p.mean[row];
    }
  };
  const auto load = [&](int stage, uint32_t first) {
    const uint32_t slot = ring + stage * kStage;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t row = row_of(first, r);
      const int bytes = row < p.rows ? 16 : 0;
      const char* const x = p.x + (uint64_t{row} * p.x_bytes + begin);
      const char* const grad = p.grad_y + (uint64_t{row} * p.grad_y_bytes + begin);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t to = slot + (r * kVectors + v) * 2 * kPlace;
        hopper::copy_async_16_zero_filled(to, x + v * kLanes * 16, bytes);
        hopper::copy_async_16_zero_filled(to + kPlace, grad + v * kLanes * 16, bytes);
      }
    }
    if constexpr (!kLoads) load_statistics(stage, first);
    hopper::end_copy_group();
  };
  const auto read = [&](uint32_t slot, int i) {
    Words<4> words;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.word[0]), "=r"(words.word[1]), "=r"(words.word[2]),
                   "=r"(words.word[3])
                 : "r"(slot + i * kPlace));
    return words;
  };

  const float per_column =
      kClusters ? 1.0f / static_cast<float>(kColumns * cluster) : kPerColumn;
  int stage = 0;
#pragma unroll
  for (int s = 0; s < kStages; ++s) load(s, first + s * step);
  if constexpr (kLoads) load_next_statistic(first);
  if constexpr (kClusters) {
    if (cluster > 1) {
      hopper::cluster_sync();
    } else {
      __syncthreads();
    }
  }
  // Which CTAs have what rows doesn't change: who is ahead of the average of all waits, but not for
  // CTAs that may not be on the GPU yet.
  const auto keep_pace = [&] {
    constexpr uint32_t kNoWait = ~0u;
    if (rank == 0) hopper::add_relaxed_gpu(p.turns, 1);
    uint32_t seen = turns_seen[team];
    if (seen == kNoWait) return;
    const uint32_t least = turns > p.lead ? (turns - p.lead) * step : 0;
    for (int tries = 0; seen < least; ++tries) {
      seen = tries < 100 ? hopper::load_relaxed_gpu(p.turns) : kNoWait;
    }
    turns_seen[team] = seen == kNoWait ? kNoWait : hopper::load_relaxed_gpu(p.turns);
  };
  for (; first < p.rows; first += step) {
    Words<4> x_words[kRows][kHold ? kVectors : 1], grad_words[kRows][kHold ? kVectors : 1];
    hopper::wait_for_copy_groups<kStages - 1>();
    __syncwarp();
    const uint32_t slot = ring + stage * kStage;
    float rstd[kRows], mean[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kLoads) {
        rstd[r] = __shfl_sync(0xffffffffu, next_statistic, r);
        mean[r] = kSums ? __shfl_sync(0xffffffffu, next_statistic, kRows + r) : 0.0f;
      } else {
        const int i = r * kSideBySide + mine;
        rstd[r] = statistics[stage][warp][i];
        mean[r] = kSums ? statistics[stage][warp][kTurnRows + i] : 0.0f;
      }
    }
    if constexpr (kLoads) load_next_statistic(first + step);
    // Vector v of row r of x and grad_y.
    const auto operands = [&](int r, int v, float (&x)[kVector], float (&grad)[kVector],
                              bool again) {
      const int i = (r * kVectors + v) * 2;
      if constexpr (kHold) {
        if (!again) x_words[r][v] = read(slot, i), grad_words[r][v] = read(slot, i + 1);
#pragma unroll
        for (int j = 0; again && j < 4; ++j) {
          asm volatile("" : "+r"(x_words[r][v].word[j]), "+r"(grad_words[r][v].word[j]));
        }
        unpack_words<T>(x_words[r][v], x);
        unpack_words<T>(grad_words[r][v], grad);
      } else {
        unpack_words<T>(read(slot, i), x);
        unpack_words<T>(read(slot, i + 1), grad);
      }
    };
    float sums[kCount];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float along = 0.0f, sum = 0.0f;
      const float shift = -mean[r] * rstd[r];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float xhat[kVector], grad[kVector];
        operands(r, v, xhat, grad, false);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          if constexpr (kSums && !kSlots) bias_sums[v][e] += grad[e];
          xhat[e] = kSums ? fmaf(xhat[e], rstd[r], shift) : __fmul_rn(xhat[e], rstd[r]);
          weight_sums[v][e] = fmaf(grad[e], xhat[e], weight_sums[v][e]);
        }
        if constexpr (kSlots) {
#pragma unroll
          for (int q = 0; q < kVector / 4; ++q) {
            float4 sum = slot_of_bias(v, q);
            sum.x += grad[4 * q], sum.y += grad[4 * q + 1];
            sum.z += grad[4 * q + 2], sum.w += grad[4 * q + 3];
            slot_of_bias(v, q) = sum;
          }
        }
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
    const auto refill = [&] {
      if constexpr (kClusters) {
        if (p.lead > 0 && threadIdx.x % kLanes >= kLanes - 32) {
          if (lane == 0) keep_pace();
          __syncwarp();
        }
      }
      __syncwarp();  // all lanes have read the statistics
      load(stage, first + kStages * step);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    };
    if constexpr (kHold && !kLate) refill();
    constexpr int kPart = (kInWarp ? kLanes : 32) / kCount;
    const float each = sum_each_of<kInWarp ? kLanes : 32>(sums);
    if constexpr (kInWarp) {
      const int begin = kLanes == 32 ? 0 : lane & ~(kLanes - 1);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] = __shfl_sync(0xffffffffu, each, begin + i * kPart);
    } else {
      constexpr int kAll = kTeamWarps * kCount;
      const uint32_t buffer = turns & 1, phase = turns >> 1 & 1;
      float* const parts = of_warp[buffer][team];
      ++turns;
      if (lane % kPart == 0) parts[threadIdx.x % kLanes / 32 * kCount + lane / kPart] = each;
      hopper::barrier_wait(hopper::numbered(RowBarrier::kSums, team), kLanes);
      float sum = kAll >= 32 || lane < kAll ? parts[lane] : 0.0f;
      if constexpr (kAll > 32) sum += parts[lane + 32];
#pragma unroll
      for (int offset = (kAll < 32 ? kAll : 32) / 2; offset >= kCount; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] = __shfl_sync(0xffffffffu, sum, i);
      if constexpr (kClusters) {
        static_assert(kRows == 1);
        if (cluster > 1) {
          hopper::Barrier& barrier = ready[buffer][team];
          if (threadIdx.x % kLanes < 32) {
            if (lane == 0) hopper::arrive_expect_bytes(barrier, sizeof(float4) * cluster);
            if (lane < cluster) {
              hopper::store_async_in_cluster(&of_cta[buffer][team][rank], barrier, lane,
                                             {sums[0], sums[kCount - 1], 0.0f, 0.0f});
            }
            __syncwarp();
          }
          hopper::wait(barrier, phase);
          const float4 part = of_cta[buffer][team][lane & (cluster - 1)];
          const int width = static_cast<int>(cluster);
          if constexpr (kSums) {
            const float2 both = sum_lanes<kMaxWarps>(float2{part.x, part.y}, width);
            sums[0] = both.x, sums[1] = both.y;
          } else {
            sums[0] = sum_lanes<kMaxWarps>(part.x, width);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float along = sums[kSums ? 2 * r : r] * per_column;
      const float slope = -along * rstd[r] * rstd[r];
      float offset = 0.0f;
      if constexpr (kSums) {
        const float sum = p.mean ? sums[2 * r + 1] * per_column : 0.0f;
        offset = -fmaf(along, -mean[r] * rstd[r], sum) * rstd[r];
      }
      const uint32_t row = row_of(first, r);
      char* const to = p.grad_x + (uint64_t{row} * p.grad_x_bytes + begin);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float x[kVector], grad[kVector];
        operands(r, v, x, grad, true);
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
    if constexpr (!kHold || kLate) refill();
  }
  hopper::allow_next_kernel();
  if (!kClusters && p.apart) return;

  // Each team's sums, and then those of the CTA.
#pragma unroll
  for (int offset = 16; kInWarp && offset >= kLanes; offset /= 2) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        weight_sums[v][e] += __shfl_xor_sync(0xffffffffu, weight_sums[v][e], offset);
        if constexpr (kSums && kInWarp) {
          bias_sums[v][e] += __shfl_xor_sync(0xffffffffu, bias_sums[v][e], offset);
        }
      }
    }
  }
  hopper::wait_for_copy_groups<0>();
  __syncthreads();
  float4* const of_team = reinterpret_cast<float4*>(shared_bytes);
  constexpr int kQuads = kColumns / 4, kBiasTeams = kSums ? kTeams : 0;
  const auto put = [&](float4* to, const auto& sums) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int q = 0; q < kVector / 4; ++q) {
        to[(v * kLanes + thread) * (kVector / 4) + q] = {sums[v][4 * q], sums[v][4 * q + 1],
                                                         sums[v][4 * q + 2], sums[v][4 * q + 3]};
      }
    }
  };
  if (mine == 0) {
    put(of_team + team * kQuads, weight_sums);
    if constexpr (kSums && !kSlots) put(of_team + (kTeams + team) * kQuads, bias_sums);
  }
  __syncthreads();
  constexpr int kAllQuads = kBiasTeams > 0 ? 2 * kQuads : kQuads;
  for (int i = threadIdx.x; i < kAllQuads; i += 32 * kWarps) {
    const bool bias = i >= kQuads;
    const int quad = bias ? i - kQuads : i;
    float* const partials = bias ? p.bias_partials : p.weight_partials;
    const float4* const from = of_team + (bias ? kTeams * kQuads : 0) + quad;
    const auto part = [&](int t) {
      if (kSlots && bias) {
        constexpr int kEach = kVector / 4;
        return reinterpret_cast<const float4*>(
            shared_bytes + kSlotPlace)[(quad / kEach / kLanes * kEach + quad % kEach) * 32 * kWarps +
                                       t * kLanes + quad / kEach % kLanes];
      }
      return from[t * kQuads];
    };
    float4 sum = part(0);
#pragma unroll
    for (int t = 1; t < kTeams; ++t) {
      const float4 more = part(t);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    if (partials) reinterpret_cast<float4*>(partials)[blockIdx.x * kQuads + quad] = sum;
  }
  if (kClusters && cluster > 1) hopper::cluster_sync();
}

template <int kLanes, int kVectors, int kRows, int kWarps, int kStages, bool kSums,
          bool kSlots = false>
constexpr int direct_backward_bytes(int element_bytes) {
  const int ring = kStages * kRows * kVectors * 2 * 32 * kWarps * 16;
  const int teams = kLanes <= 32 ? kWarps : kWarps * 32 / kLanes;
  const int floats = teams * kLanes * kVectors * 16 / element_bytes;
  const int slots = kSums && kSlots ? floats * 4 : 0;
  const int sums = floats * (kSums && !kSlots ? 8 : 4);
  return (ring > sums ? ring : sums) + slots;
}

}  // namespace ikbo::norm
