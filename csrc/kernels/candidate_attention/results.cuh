// How a consumer's results get to memory: through shared memory and the copy engine where a warp's
// sixteen rows are all the user's and lie side by side, and a slot of q is free for them; else from
// registers, 16 bytes at a time, which takes four times as many instructions.
#pragma once

#include <cmath>

#include "hopper/fragments.cuh"
#include "kernels/candidate_attention/shape.cuh"
#include "kernels/numeric.cuh"

namespace ikbo::attention {

template <class S>
using Outputs = float[S::kHeadV / 2];

// A consumer's part of a tile.
struct ConsumerRows {
  int32_t head, first_row, rows;

  __device__ ConsumerRows(const QueryTile& tile, int consumer)
      : head(tile.head),
        first_row(tile.first_row + consumer * kConsumerRows),
        rows(tile.rows - consumer * kConsumerRows) {}
};

// The thread's two rows of the consumer's 64, as wgmma's sums lie.
__device__ inline int32_t row_of_thread(int half) {
  const int thread = threadIdx.x % kGroupThreads;
  return thread / 32 * 16 + thread % 32 / 4 + 8 * half;
}

// Lane a of each four neighbours gives word b to lane b, as its word a.
__device__ inline void transpose_of_four(uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (b & step) continue;
      const uint32_t sent = upper ? words[b] : words[b + step];
      const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, step);
      if (upper) {
        words[b] = got;
      } else {
        words[b + step] = got;
      }
    }
  }
}

// The lse of a row of the batch.
__device__ inline void write_lse(const Params& params, int32_t row, int32_t head, float lse) {
  const FastDivisor& S = params.runs.S;
  const int32_t candidate = S.divide(row);
  params.lse[(int64_t{candidate} * params.runs.H + head) * S.divisor() +
             S.remainder(row, candidate)] = lse;
}

template <class T>
__device__ inline T* result_of(const Params& params, int32_t row, int32_t head) {
  return static_cast<T*>(params.out) + (int64_t{row} * params.runs.H + head) * params.Dv;
}

// Rounds and stores the rows that are the user's. Four neighbouring lanes hold two columns each of
// every eight; of every 32 they exchange them, so that each stores eight columns of its own.
template <class S>
__device__ inline void store_results(const Params& params, const Outputs<S>& outputs,
                                     const float (&lse)[2], const ConsumerRows& place) {
  using T = typename S::T;
  const int lane_of_four = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = row_of_thread(half);
    int32_t in_batch = params.runs.all_rows();
    if (row < place.rows) in_batch = params.runs.row_of_batch(place.first_row + row);
    const bool exists = in_batch < params.runs.all_rows();
    T* const to = result_of<T>(params, in_batch, place.head) + 8 * lane_of_four;
#pragma unroll
    for (int d = 0; d < S::kHeadV; d += 32) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const o = &outputs[d / 2 + 4 * i + 2 * half];
        words[i] = pack<T>(o[0], o[1]);
      }
      transpose_of_four(words);
      if (exists && d + 8 * lane_of_four < params.Dv) {
        *reinterpret_cast<uint4*>(to + d) = {words[0], words[1], words[2], words[3]};
      }
    }
    if (exists && params.lse != nullptr && lane_of_four == 0) {
      write_lse(params, in_batch, place.head, lse[half]);
    }
  }
}

// The same through `slot`, the consumer's: each warp its own rows. Its first lane must wait for its
// stores before the slot is used again.
template <class S>
__device__ inline void stage_results(typename S::T* slot, const Params& params,
                                     const Outputs<S>& outputs, const float (&lse)[2],
                                     const ConsumerRows& place) {
  using T = typename S::T;
  const int lane = threadIdx.x % 32, first_row = threadIdx.x % kGroupThreads / 32 * kWarpRows;
  const bool scattered = params.runs.order != nullptr || place.rows < first_row + kWarpRows;
  // By a vote, so that ptxas knows that the warp stays together.
  if (__any_sync(0xffffffffu, scattered)) {
    return store_results<S>(params, outputs, lse, place);
  }
  constexpr int kSlotBlock = kConsumerRows * hopper::kSwizzleRowBytes;
  auto* const bytes = reinterpret_cast<char*>(slot);
  const uint32_t at = row_in_slot();
#pragma unroll
  for (int d = 0; d < S::kHeadV / 16; ++d) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const o = &outputs[8 * d + 2 * i];
      words[i] = pack<T>(o[0], o[1]);
    }
    hopper::store_tiles(bytes + d / 4 * kSlotBlock + (at ^ d % 4 * 32), words);
  }
  hopper::fence_shared_for_async();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int d = 0; d < S::kHeadV / kBlock; ++d) {
      hopper::tma_store(
          params.results, bytes + d * kSlotBlock + first_row * hopper::kSwizzleRowBytes,
          hopper::L2Hint::kNormal, d * kBlock, place.head, place.first_row + first_row);
    }
    hopper::tma_store_commit();
  }
  if (params.lse != nullptr && lane % 4 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      write_lse(params, place.first_row + row_of_thread(half), place.head, lse[half]);
    }
  }
}

// Of a tile without keys, a row a thread: zeros where there is nothing to attend to, NaN where the
// user or the keys don't exist.
template <class S>
__device__ inline void store_without_keys(const Params& params, bool keys_exist,
                                          const ConsumerRows& place) {
  using T = typename S::T;
  const UserRuns& runs = params.runs;
  const int32_t of_group = threadIdx.x % kGroupThreads;
  if (of_group >= min(place.rows, kConsumerRows)) return;
  const int32_t row = runs.row_of_batch(place.first_row + of_group);
  if (row >= runs.all_rows()) return;
  const int32_t user = params.cand_to_user[runs.S.divide(row)];
  const bool exists = keys_exist && user >= -1 && user < runs.U;
  const float value = exists ? 0 : NAN;
  const uint32_t two = pack<T>(value, value);
  auto* const to = reinterpret_cast<uint4*>(result_of<T>(params, row, place.head));
  for (int32_t i = 0; i < params.Dv / 8; ++i) to[i] = {two, two, two, two};
  if (params.lse != nullptr) write_lse(params, row, place.head, exists ? -INFINITY : NAN);
}

}  // namespace ikbo::attention
