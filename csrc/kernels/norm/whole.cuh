// What the backward's kernels for whole, aligned rows of one type share.
#pragma once

#include "config/norm_backward.h"
#include "hopper/async_copy.cuh"
#include "hopper/dependent_launch.cuh"
#include "kernels/norm/compiled.h"
#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

// 16 bytes of shared memory. The assembler doesn't know them from an earlier time: what is read
// again is not to wait in registers.
__device__ inline Words<4> read_shared(uint32_t from) {
  Words<4> words;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.word[0]), "=r"(words.word[1]), "=r"(words.word[2]), "=r"(words.word[3])
               : "r"(from));
  return words;
}

// The sums of kCount values, a power of two, over kLanes lanes. Lanes hand on what others add up:
// value i is then in the i-th of kCount equal parts of the lanes. In the order of sum_lanes.
template <int kLanes, int kCount>
__device__ inline float sum_each(float (&values)[kCount]) {
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

// Of those values of kWarps warps, one after the other in `parts`, the sums over warps: value i in
// lane i. In the order of exchange().
template <int kWarps, int kCount>
__device__ inline float sum_parts(const float* parts) {
  constexpr int kAll = kWarps * kCount;
  constexpr int kWidth = kAll <= 4 ? 4 : kAll <= 8 ? 8 : kAll <= 16 ? 16 : 32;
  const int lane = threadIdx.x % 32;
  float sum = kAll >= 32 || lane < kAll ? parts[lane] : 0.0f;
  if constexpr (kAll > 32) sum += parts[lane + 32];
#pragma unroll
  for (int offset = kWidth / 2; offset >= kCount; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  return sum;
}

// SMs are not equally fast, and which CTAs have what rows doesn't change: who is ahead of the
// average of all by more than the lead waits, but not for CTAs that may not be on the GPU yet. By
// one thread of a team, after `turn` turns; `seen` is its own, 0 at first.
__device__ inline void keep_pace(const WholeBackward& p, bool counts, uint32_t turn, uint32_t teams,
                                 uint32_t& seen) {
  constexpr uint32_t kNoWait = ~0u;
  if (counts) hopper::add_relaxed_gpu(p.turns, 1);
  uint32_t now = seen;
  if (now == kNoWait) return;
  const uint32_t least = turn > p.lead ? (turn - p.lead) * teams : 0;
  for (int tries = 0; now < least; ++tries) {
    now = tries < 100 ? hopper::load_relaxed_gpu(p.turns) : kNoWait;
  }
  // Looked at a turn late, when it costs no wait.
  seen = now == kNoWait ? kNoWait : hopper::load_relaxed_gpu(p.turns);
}

}  // namespace ikbo::norm
