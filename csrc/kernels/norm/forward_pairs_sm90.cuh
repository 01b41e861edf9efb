// LayerNorm of whole aligned rows over a few warps with y in e4m3: as norm_forward_quant_sm90,
// which is bound by its instructions, but a CTA takes two rows. They share weights and biases, once
// unpacked, barriers and addresses; and what is a number a row is each half of the lanes' own. So a
// row takes a sixth fewer instructions, and an SM works on more rows: 8 to 20 for 6 to 16. (With 6
// or 7 warps it would have 6 rows, and took longer than a row a CTA.)
//
// The bits are the same: sums are added in the same order.
#pragma once

#include "kernels/norm/forward_quant_sm90.cuh"

namespace ikbo::norm {

// Of two rows, each with its number in every lane: sums over a warp, of the first row in the lower
// half of the lanes, of the second in the upper one.
__device__ inline float sum_pair(float first, float second, bool upper) {
  const float own = upper ? second : first, other = upper ? first : second;
  return sum_lanes<16>(own + __shfl_xor_sync(0xffffffffu, other, 16), 16);
}
// From there to every lane.
__device__ inline void spread_pair(float own, bool upper, float (&both)[2]) {
  const float other = __shfl_xor_sync(0xffffffffu, own, 16);
  both[0] = upper ? other : own, both[1] = upper ? own : other;
}

template <class T, int kWarps>
__global__ void __maxnreg__(96) norm_forward_pairs_sm90(const __grid_constant__ PlainForward p) {
  constexpr int kVectors = 4, kVector = 16 / sizeof(T);
  constexpr uint32_t kStep = 16 * 32 * kWarps;
  constexpr float kPartColumns = 32.0f * kVectors * kVector;
  constexpr int kWidth = kWarps <= 2 ? 2 : kWarps <= 4 ? 4 : 8;
  __shared__ float2 of_warp[kWarps][2];
  __shared__ float largest_of_warp[kWarps][2];
  hopper::touch(p);
  hopper::wait_for_previous_kernel();
  hopper::allow_next_kernel();
  const uint32_t row = 2 * blockIdx.x;
  const bool both = row + 1 < p.rows;  // else the second row is the first again
  uint32_t first = 16 * threadIdx.x;

  const char* const from = p.x + uint64_t{row} * p.x_bytes + first;
  const char* const from_second = from + (both ? p.x_bytes : 0);
  Words<4> x[2][kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) x[0][v] = load_words<4>(from + v * kStep);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) x[1][v] = load_words<4>(from_second + v * kStep);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = lane / 16;
  const bool upper = half != 0;
  const int peer = lane & (kWidth - 1);  // a warp whose part of row `half` the lane merges
  float values[2][kVectors][kVector], sum[2], mean[2], squares[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) unpack_words<T>(x[r][v], values[r][v]);
    sum[r] = sum_of_elements(values[r], [](float value, float sum) { return sum + value; });
  }
  const float part_sum = sum_pair(sum[0], sum[1], upper);
  spread_pair(__fmul_rn(part_sum, 1.0f / kPartColumns), upper, mean);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) values[r][v][e] -= mean[r];
    }
    squares[r] =
        sum_of_elements(values[r], [](float value, float sum) { return fmaf(value, value, sum); });
  }
  const float part_squares = sum_pair(squares[0], squares[1], upper);
  if (lane % 16 == 0) of_warp[warp][half] = {part_sum, part_squares};
  // The first ones arrive while warps meet.
  const Words<4> weight = load_words<4>(p.weight + first), bias = load_words<4>(p.bias + first);
  __syncthreads();
  const bool exists = peer < kWarps;
  const float2 part = exists ? of_warp[peer][half] : float2{0.0f, 0.0f};
  const float own_mean = __fmul_rn(sum_lanes<kWidth>(part.x, kWidth), p.per_column);
  const float away = __fmul_rn(part.x, 1.0f / kPartColumns) - own_mean;
  const float merged = exists ? fmaf(__fmul_rn(kPartColumns, away), away, part.y) : 0.0f;
  const float own_rstd = rsqrtf(fmaf(sum_lanes<kWidth>(merged, kWidth), p.per_column, p.eps));
  const bool tells = warp == 0 && lane % 16 == 0 && (both || !upper);
  if (tells) {
    if (p.mean) p.mean[row + half] = own_mean;
    if (p.rstd) p.rstd[row + half] = own_rstd;
  }
  float of_row[2], rstd[2], shift[2];
  spread_pair(own_mean, upper, of_row);
  spread_pair(own_rstd, upper, rstd);
#pragma unroll
  for (int r = 0; r < 2; ++r) shift[r] = (mean[r] - of_row[r]) * rstd[r];

  LargestValue found[2];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float w[kVector], b[kVector];
    unpack_words<T>(v == 0 ? weight : load_words<4>(p.weight + first + v * kStep), w);
    unpack_words<T>(v == 0 ? bias : load_words<4>(p.bias + first + v * kStep), b);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        values[r][v][e] = fmaf(fmaf(values[r][v][e], rstd[r], shift[r]), w[e], b[e]);
      }
      found[r].add(values[r][v]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float largest = max_of_warp(found[r].get());
    if (lane == 0) largest_of_warp[warp][r] = largest;
  }
  __syncthreads();
  float largest = exists ? largest_of_warp[peer][half] : 0.0f;
#pragma unroll
  for (int offset = kWidth / 2; offset >= 1; offset /= 2) {
    largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  const RowScale scale(largest);
  float factor[2];
  spread_pair(scale.inverse, upper, factor);
  if (tells) p.row_scales[row + half] = scale.scale;
  asm volatile("" : "+r"(first));
  char* const to = p.y + uint64_t{row} * p.y_bytes + first * kVector / 16;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r == 1 && !both) break;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) values[r][v][e] = __fmul_rn(values[r][v][e], factor[r]);
      store_words<false>(to + r * uint64_t{p.y_bytes} + v * kStep * kVector / 16,
                         pack_words<E4m3>(values[r][v]));
    }
  }
}

}  // namespace ikbo::norm
