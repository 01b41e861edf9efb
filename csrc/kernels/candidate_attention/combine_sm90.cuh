// Adds up the parts of candidate attention whose keys were cut: each part's outputs weigh as much
// as the exponentials they were normalised by, exp(lse_p - lse) with lse = log(sum of exp(lse_p)).
// In the order of the parts.
#pragma once

#include <cmath>
#include <cstdint>

#include "hopper/dependent_launch.cuh"
#include "kernels/candidate_attention/query_tiles.cuh"
#include "kernels/numeric.cuh"

namespace ikbo::attention {

inline constexpr int kCombineWarps = 4;

struct CombineParams {
  UserRuns runs;
  const float* partial_out;  // [parts, rows, H, Dv], rows grouped by user
  const float* partial_lse;  // [parts, rows, H]
  void* out;                 // [rows, H, Dv]
  float* lse;                // [rows / S, H, S] or null
  int64_t rows;
  int32_t Dv, parts;
};

// A warp a row and head.
template <class T>
__global__ void __launch_bounds__(32 * kCombineWarps) combine_sm90(CombineParams p) {
  hopper::wait_for_previous_kernel();
  const int lane = threadIdx.x % 32;
  const int32_t H = p.runs.H, S = p.runs.S;
  const int64_t places = p.rows * H;
  const int64_t place = int64_t{blockIdx.x} * kCombineWarps + threadIdx.x / 32;
  if (place >= places) return;
  const int32_t row = p.runs.row_of_batch(static_cast<int32_t>(place / H));
  const int32_t head = static_cast<int32_t>(place % H);
  if (row >= p.rows) return;
  const int64_t to = int64_t{row} * H + head;
  float maximum = -INFINITY;
  for (int part = 0; part < p.parts; ++part) {
    const float lse = p.partial_lse[part * places + place];
    maximum = lse > maximum || isnan(lse) ? lse : maximum;
  }
  // Nothing to attend to: no weight, and outputs of 0.
  const float offset = maximum == -INFINITY ? 0 : maximum;
  float sum = 0;
  for (int part = 0; part < p.parts; ++part) {
    sum += __expf(p.partial_lse[part * places + place] - offset);
  }
  const float scale = maximum == -INFINITY ? 1 : 1 / sum;
  for (int d = 2 * lane; d < p.Dv; d += 64) {
    float2 total{0, 0};
    for (int part = 0; part < p.parts; ++part) {
      const int64_t at = part * places + place;
      const float weight = __expf(p.partial_lse[at] - offset) * scale;
      const float2 out = *reinterpret_cast<const float2*>(p.partial_out + at * p.Dv + d);
      total.x += weight * out.x;
      total.y += weight * out.y;
    }
    reinterpret_cast<uint32_t*>(p.out)[(to * p.Dv + d) / 2] = pack<T>(total.x, total.y);
  }
  if (p.lse == nullptr || lane != 0) return;
  p.lse[(int64_t{row} / S * H + head) * S + row % S] =
      maximum == -INFINITY ? -INFINITY : offset + logf(sum);
}

}  // namespace ikbo::attention
