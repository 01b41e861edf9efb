// How a consumer's results get to memory.
#pragma once

#include <cmath>

#include "hopper/fragments.cuh"
#include "hopper/tma.cuh"
#include "kernels/candidate_attention/shape.cuh"
#include "kernels/numeric.cuh"

namespace ikbo::attention {

template <class S>
using Outputs = float[S::kHeadV / 2];

// A consumer's part of a tile.
struct ConsumerRows {
  int32_t head, first_row, rows, part;

  __device__ ConsumerRows(const QueryTile& tile, int consumer)
      : head(tile.head),
        first_row(tile.first_row + consumer * kConsumerRows),
        rows(tile.rows - consumer * kConsumerRows),
        part(tile.part) {}
};

// The thread's two rows of the consumer's 64, as wgmma's sums lie.
__device__ inline int32_t row_of_thread(int half) {
  const int thread = threadIdx.x % kGroupThreads;
  return thread / 32 * 16 + thread % 32 / 4 + 8 * half;
}

// Rounds the outputs into a slot of q and stores those of the user's rows from there. The slot must
// not be written before the thread that issued the store has waited for it (tma_store_wait_read)
// and all threads have met once more.
template <class S>
__device__ inline void store_outputs(Shared<S>& shared, const Params& params,
                                     const Outputs<S>& outputs, int consumer, int slot,
                                     const ConsumerRows& place) {
  using T = typename S::T;
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32;
  const int staged_row = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
  auto& staging = shared.q[consumer][slot];
#pragma unroll
  for (int d = 0; d < S::kHeadV; d += 16) {
    const float* const o = &outputs[d / 2];
    const uint32_t tiles[4] = {pack<T>(o[0], o[1]), pack<T>(o[2], o[3]), pack<T>(o[4], o[5]),
                               pack<T>(o[6], o[7])};
    auto* const block = reinterpret_cast<char*>(staging[d / kBlock]);
    const uint32_t byte = (d % kBlock + lane / 16 * 8) * sizeof(T);
    hopper::store_tiles(block + hopper::swizzle_128(staged_row, byte), tiles);
  }
  // Also where ordinary loads follow: the slot's next q comes by the copy engine.
  hopper::fence_shared_for_async();
  hopper::barrier_wait(hopper::numbered(NamedBarrier::kStaged, consumer), kGroupThreads);
  if (place.rows >= kConsumerRows && params.rows_together == kConsumerRows) {
    if (thread != 0) return;
    const int32_t first_row = params.runs.row_of_batch(place.first_row);
#pragma unroll
    for (int d = 0; d < S::kHeadV / kBlock; ++d) {
      hopper::tma_store(params.out, staging[d], hopper::L2Hint::kEvictFirst, d * kBlock, place.head,
                        first_row);
    }
    hopper::tma_store_commit();
    return;
  }
  constexpr int kChunks = S::kHeadV / 8;  // of 16 bytes, in a row
  for (int i = thread; i < min(place.rows, kConsumerRows) * kChunks; i += kGroupThreads) {
    const int row = i / kChunks, d = i % kChunks * 8;
    const int32_t in_batch = params.runs.row_of_batch(place.first_row + row);
    if (d >= params.Dv || in_batch >= params.runs.B * params.runs.S) continue;
    const auto* block = reinterpret_cast<const char*>(staging[d / kBlock]);
    T* const to = static_cast<T*>(params.out_rows) +
                  (int64_t{in_batch} * params.runs.H + place.head) * params.Dv + d;
    *reinterpret_cast<uint4*>(to) =
        *reinterpret_cast<const uint4*>(block + hopper::swizzle_128(row, d % kBlock * sizeof(T)));
  }
}

// The lse of a row of the batch.
__device__ inline void write_lse(const Params& params, int32_t row, int32_t head, float lse) {
  const int32_t S = params.runs.S, candidate = row / S;
  params.lse[(int64_t{candidate} * params.runs.H + head) * S + row % S] = lse;
}

// Of the thread's two rows, one lane of four.
__device__ inline void store_lse(const Params& params, const float (&lse)[2],
                                 const ConsumerRows& place) {
  if (params.lse == nullptr || threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of_thread(half);
    if (row >= place.rows) continue;
    const int32_t in_batch = params.runs.row_of_batch(place.first_row + row);
    if (in_batch < params.runs.B * params.runs.S)
      write_lse(params, in_batch, place.head, lse[half]);
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
  if (row >= runs.B * runs.S) return;
  const int32_t user = params.cand_to_user[row / runs.S];
  const bool exists = keys_exist && user >= -1 && user < runs.U;
  const float value = exists ? 0 : NAN, lse = exists ? -INFINITY : NAN;
  const uint32_t two = pack<T>(value, value);
  auto* const to = reinterpret_cast<uint4*>(static_cast<T*>(params.out_rows) +
                                            (int64_t{row} * runs.H + place.head) * params.Dv);
  for (int32_t i = 0; i < params.Dv / 8; ++i) to[i] = {two, two, two, two};
  if (params.lse != nullptr) write_lse(params, row, place.head, lse);
}

}  // namespace ikbo::attention
