// The forward of whole, aligned rows of one type without rings: a group of threads takes its rows
// from global memory straight into registers, packed, and a grid has a group for each kRows rows.
// What covers memory's latency is many CTAs an SM, not stages.
//
// A row of kLanes threads with kVectors vectors each has the sums of norm_forward_sm90 in the same
// order, and so its bits, where the mapping has the same numbers.
#pragma once

#include <algorithm>

#include "hopper/dependent_launch.cuh"
#include "kernels/norm/forward_sm90.cuh"

namespace ikbo::norm {

// Of NormForward what is read: two lines of constant memory.
struct DirectForward {
  const char *x, *weight,
      *bias;  // of one type; weight and bias may be null. An RMSNorm has no bias
  char* y;
  int64_t x_row_bytes, y_row_bytes;
  float *mean, *rstd;  // may be null
  uint32_t rows;
  float eps;
};

using DirectKernel = void (*)(DirectForward);

template <int kLanes>
inline constexpr int kDirectThreads = kLanes <= 32 ? 256 : kLanes;

// CTAs an SM, from the registers that a thread's packed words and some more take.
template <int kLanes, int kVectors, int kRows, bool kLayer, bool kEarly>
constexpr int direct_ctas() {
  constexpr int kWarps = kDirectThreads<kLanes> / 32;
  const int words = 4 * kVectors * (kRows + (kEarly ? (kLayer ? 2 : 1) : 0));
  const int more = words >= 16 ? 48 : kRows == 1 ? 32 : 40;
  const int registers = words <= 4 ? 32 : (words + more + 7) / 8 * 8;
  // A quarter of an SM has 512 registers a lane.
  return std::clamp(512 / registers * 4 / kWarps, 1, 64 / kWarps);
}

// kRows rows a group of threads, all of whose loads are on their way before the first is used.
// kEarly: weight and bias, too; else they are read from L1 or L2 once a row's sums are known.
// kPlain: results are stored as any, not as what is read last.
template <class T, int kLanes, int kVectors, int kRows, bool kLayer, bool kEarly, bool kPlain>
__global__ void __launch_bounds__(kDirectThreads<kLanes>,
                                  direct_ctas<kLanes, kVectors, kRows, kLayer, kEarly>())
    norm_forward_direct_sm90(const __grid_constant__ DirectForward p) {
  static_assert(!std::is_same_v<T, __half>, "kOnes");
  constexpr int kVector = 16 / sizeof(T);
  constexpr bool kInWarp = kLanes <= 32;
  constexpr int kWarps = kInWarp ? 1 : kLanes / 32;  // of a row
  constexpr int kColumns = kLanes * kVectors * kVector;
  static_assert(kInWarp || kLanes % 32 == 0);
  hopper::touch(p);
  hopper::wait_for_previous_kernel();
  hopper::allow_next_kernel();

  const int thread = kInWarp ? threadIdx.x % kLanes : threadIdx.x;
  const uint32_t groups = kInWarp ? blockDim.x / kLanes : 1;
  const uint32_t first_row = blockIdx.x * (groups * kRows) + (kInWarp ? threadIdx.x / kLanes : 0);
  // Threads without a row do the last one again, and store the same: all of a warp shuffle, and
  // code without branches lets loads go ahead.
  const auto row_of = [&](int r) {
    const uint32_t row = first_row + r * groups;
    return kInWarp || kRows > 1 ? min(row, p.rows - 1) : row;
  };

  Words<4> x[kRows][kVectors];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const char* const from = p.x + row_of(r) * p.x_row_bytes + thread * 16;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) x[r][v] = load_words<4>(from + v * kLanes * 16);
  }
  // Adding -0 changes nothing, not even the sign of a zero.
  constexpr uint32_t kOnes = sizeof(T) == 4 ? 0x3f800000u : 0x3f803f80u;
  constexpr uint32_t kMinusZeros = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;
  const auto parameter = [](const char* from, int at, uint32_t absent) {
    return from ? load_words<4>(from + at) : Words<4>{absent, absent, absent, absent};
  };
  Words<4> early_w[kVectors], early_b[kVectors];
  if constexpr (kEarly) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int at = (v * kLanes + thread) * 16;
      early_w[v] = parameter(p.weight, at, kOnes);
      if constexpr (kLayer) early_b[v] = parameter(p.bias, at, kMinusZeros);
    }
  }

  constexpr float kPerColumn = 1.0f / static_cast<float>(kColumns);
  // Of the columns that a row's threads in this warp have.
  constexpr float kPartColumns = static_cast<float>(kInWarp ? kColumns : kColumns / kWarps);
  constexpr float kPerPartColumn = 1.0f / kPartColumns;
  constexpr int kSumLanes = kInWarp ? kLanes : 32;
  // Unpacked again in each pass, so that no more than the packed words are kept.
  const auto values_of = [&](int r, int v, float (&values)[kVector]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(x[r][v].word[i]));
    unpack_words<T>(x[r][v], values);
  };
  // As sum_of_elements().
  const auto sum_over = [&](int r, const auto& add) {
    float sums[4] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float values[kVector];
      values_of(r, v, values);
#pragma unroll
      for (int e = 0; e < kVector; ++e) sums[e % 4] = add(values[e], sums[e % 4]);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  };

  float mean[kRows], squares[kRows], sum[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    mean[r] = sum[r] = 0.0f;
    if constexpr (kLayer) {
      sum[r] = sum_over(r, [](float value, float sum) { return sum + value; });
    }
  }
  if constexpr (kLayer) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sum[r] = sum_lanes<kSumLanes>(sum[r], kSumLanes);
      mean[r] = __fmul_rn(sum[r], kPerPartColumn);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float of_part = mean[r];
    squares[r] = sum_over(r, [&](float value, float sum) {
      const float away = kLayer ? value - of_part : value;
      return fmaf(away, away, sum);
    });
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) squares[r] = sum_lanes<kSumLanes>(squares[r], kSumLanes);

  float shift[kRows];  // of the mean that deviations are from, from the row's
  float of_row[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) shift[r] = 0.0f, of_row[r] = mean[r];
  if constexpr (!kInWarp) {
    // The next power of two; lanes beyond the warps add nothing.
    constexpr int kWidth = kWarps <= 2    ? kWarps
                           : kWarps <= 4  ? 4
                           : kWarps <= 8  ? 8
                           : kWarps <= 16 ? 16
                                          : 32;
    __shared__ float4 of_warp[kRows][kWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        of_warp[r][warp] = {sum[r], squares[r], kPartColumns, mean[r]};
    }
    __syncthreads();
    const int peer = lane & (kWidth - 1);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float4 part{0.0f, 0.0f, 0.0f, 0.0f};
      if (kWidth == kWarps || peer < kWarps) part = of_warp[r][peer];
      if constexpr (kLayer) {
        // As Moments.
        const float2 both = sum_lanes<kWidth>(float2{part.x, part.z}, kWidth);
        of_row[r] = __fmul_rn(both.x, kPerColumn);
        const float away = part.w - of_row[r];
        squares[r] = sum_lanes<kWidth>(fmaf(part.z * away, away, part.y), kWidth);
        shift[r] = mean[r] - of_row[r];
      } else {
        squares[r] = sum_lanes<kWidth>(part.y, kWidth);
      }
    }
  }
  float rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rstd[r] = rsqrtf(fmaf(squares[r], kPerColumn, p.eps));
    if (thread == 0) {
      if (kLayer && p.mean) p.mean[row_of(r)] = of_row[r];
      if (p.rstd) p.rstd[row_of(r)] = rstd[r];
    }
    shift[r] *= rstd[r];
  }

  // A vector ahead of the one at hand: no load goes ahead of a store by itself.
  Words<4> ahead_w, ahead_b;
  const auto load_ahead = [&](int v) {
    const int at = (v * kLanes + thread) * 16;
    ahead_w = parameter(p.weight, at, kOnes);
    if constexpr (kLayer) ahead_b = parameter(p.bias, at, kMinusZeros);
  };
  if constexpr (!kEarly) load_ahead(0);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = (v * kLanes + thread) * 16;
    float w[kVector], b[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) b[e] = -0.0f;
    unpack_words<T>(kEarly ? early_w[v] : ahead_w, w);
    if constexpr (kLayer) unpack_words<T>(kEarly ? early_b[v] : ahead_b, b);
    if (!kEarly && v + 1 < kVectors) load_ahead(v + 1);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float values[kVector];
      values_of(r, v, values);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        if constexpr (kLayer) values[e] -= mean[r];
        // Over warps a zero's sign is the sum's, as in norm_forward_sm90.
        values[e] = kInWarp ? values[e] * rstd[r] : fmaf(values[e], rstd[r], shift[r]);
        values[e] = fmaf(values[e], w[e], b[e]);
      }
      char* const to = p.y + row_of(r) * p.y_row_bytes + at;
      const Words<4> words = pack_words<T>(values);
      if constexpr (kPlain) {
        *reinterpret_cast<uint4*>(to) = {words.word[0], words.word[1], words.word[2],
                                         words.word[3]};
      } else {
        store_words(to, words);
      }
    }
  }
}

}  // namespace ikbo::norm
