// A tile whose keys are cut into parts, one for each CTA of a cluster: every CTA keeps its results
// in its shared memory, and each finishes some of the tile's rows from those of all.
#pragma once

#include <cmath>

#include "hopper/cluster.cuh"
#include "kernels/candidate_attention/results.cuh"

namespace ikbo::attention {

// Where q, keys and values were.
template <class S>
struct Partial {
  static constexpr int kStride = S::kHeadV + 8;  // so that a warp's rows are in different banks
  // Divided by the part's sum of exponentials.
  float outputs[S::kConsumers][kConsumerRows][kStride];
  float lse[S::kConsumers][kConsumerRows];
};
template <class S>
__device__ inline Partial<S>& partial(Shared<S>& shared) {
  static_assert(sizeof(Partial<S>) <= sizeof(shared.q) + sizeof(shared.k) + sizeof(shared.v));
  return reinterpret_cast<Partial<S>&>(shared);
}

// Whether a CTA's results are parts of a tile. Where there are fewer tiles than clusters, some
// clusters have none.
template <class S>
__device__ inline bool meets(const Shared<S>& shared, const Params& params) {
  return params.is_split() && !shared.tiles.tiles[0].is_last();  // all of a cluster alike
}

// All threads of a cluster: once its parts are kept, and once they have been read. The second time
// nothing is handed over, so that it needs no release, which is a fence of global memory as well:
// about a thousand clocks. What was read has arrived by then: it was stored.
__device__ inline void meet_with_parts() { hopper::cluster_sync(); }
__device__ inline void meet_after_reading() { hopper::cluster_sync_relaxed(); }

// Each consumer waits at a barrier of its own that the others only arrive at: they come from
// different places in the code, which a barrier that all wait at must not be (synccheck).
template <class S>
__device__ inline void wait_for_consumers(int consumer) {
  constexpr int kAll = S::kConsumers * kGroupThreads;
#pragma unroll
  for (int i = 1; i < S::kConsumers; ++i) {
    const int other = consumer + i < S::kConsumers ? consumer + i : consumer + i - S::kConsumers;
    hopper::barrier_arrive(hopper::numbered(NamedBarrier::kEnd, other), kAll);
  }
  hopper::barrier_wait(hopper::numbered(NamedBarrier::kEnd, consumer), kAll);
}

// All consumers, each once. Waits until neither reads q, keys or values any more.
template <class S>
__device__ inline void keep_partial(Shared<S>& shared, const Outputs<S>& outputs,
                                    const float (&lse)[2], int consumer) {
  wait_for_consumers<S>(consumer);
  Partial<S>& mine = partial(shared);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of_thread(half);
    float* const to = mine.outputs[consumer][row];
#pragma unroll
    for (int i = 0; i < S::kHeadV / 8; ++i) {
      *reinterpret_cast<float2*>(to + 8 * i + threadIdx.x % 4 * 2) = {
          outputs[4 * i + 2 * half], outputs[4 * i + 2 * half + 1]};
    }
    if (threadIdx.x % 4 == 0) mine.lse[consumer][row] = lse[half];
  }
  __syncwarp();  // see store_results
}

// The same where there is nothing to attend to (-inf) or the keys don't exist (NaN): such outputs
// aren't read, or don't matter.
template <class S>
__device__ inline void keep_no_partial(Shared<S>& shared, float lse, int consumer) {
  wait_for_consumers<S>(consumer);
  const int row = threadIdx.x % kGroupThreads;
  if (row < kConsumerRows) partial(shared).lse[consumer][row] = lse;
  __syncwarp();  // see store_results
}

// All threads of the consumers, while the cluster's shared memory stays as it is. Adds up the
// parts of this CTA's share of the tile's rows, 8 elements a thread at a time: a part weighs
// exp(lse of the part - lse), lse = log(sum of exp(lse of a part)). In the order of the parts.
template <class S, int kMaxParts>
__device__ inline void finish_rows(Shared<S>& shared, const Params& params, int rank) {
  using T = typename S::T;
  const UserRuns& runs = params.runs;
  const QueryTile tile = shared.tiles.tiles[0];  // a CTA has one at a time; the other slot says so
  const int first = params.parts.divide(rank * tile.rows);
  const int end = params.parts.divide((rank + 1) * tile.rows);
  constexpr int kChunks = S::kHeadV / 8;
  for (int i = threadIdx.x; i < (end - first) * kChunks; i += S::kConsumers * kGroupThreads) {
    const int row = first + i / kChunks, d = i % kChunks * 8;
    const int32_t in_batch = runs.row_of_batch(tile.first_row + row);
    if (d >= params.Dv || in_batch >= runs.all_rows()) continue;
    const int consumer = row / kConsumerRows, of_consumer = row % kConsumerRows;
    const float* const lse = &partial(shared).lse[consumer][of_consumer];
    const auto* const from =
        reinterpret_cast<const float4*>(&partial(shared).outputs[consumer][of_consumer][d]);
    // All loads are on their way before the first is needed: one takes 200 clocks and more.
    // Parts that there aren't have a value too, or registers would be kept for it across rounds.
    float weights[kMaxParts] = {};
    float4 low[kMaxParts] = {}, high[kMaxParts] = {};
#pragma unroll
    for (int part = 0; part < kMaxParts; ++part) {
      if (part >= params.parts.divisor()) continue;
      weights[part] = hopper::load_in_cluster(lse, part);
      low[part] = hopper::load_in_cluster(from, part);
      high[part] = hopper::load_in_cluster(from + 1, part);
    }
    float maximum = -INFINITY;
#pragma unroll
    for (int part = 0; part < kMaxParts; ++part) {
      if (part >= params.parts.divisor()) continue;
      maximum = weights[part] > maximum || isnan(weights[part]) ? weights[part] : maximum;
    }
    float sum = 0, total[8] = {};
#pragma unroll
    for (int part = 0; part < kMaxParts; ++part) {
      if (part >= params.parts.divisor()) continue;
      const float weight = expf(weights[part] - maximum);
      // Also where all have -inf, which makes it NaN; unless NaN is what they have.
      if (maximum == -INFINITY || weight == 0) continue;
      sum += weight;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        total[k] += weight * (&low[part].x)[k];
        total[4 + k] += weight * (&high[part].x)[k];
      }
    }
    bool exists = true;
    if (maximum == -INFINITY) {  // only rows without keys may be without a user
      const int32_t user = params.cand_to_user[runs.S.divide(in_batch)];
      exists = user >= -1 && user < runs.U;
    }
    const float scale = !exists ? NAN : maximum == -INFINITY ? 0 : 1 / sum;
    for (float& value : total) value *= scale;
    *reinterpret_cast<uint4*>(result_of<T>(params, in_batch, tile.head) + d) = {
        pack<T>(total[0], total[1]), pack<T>(total[2], total[3]), pack<T>(total[4], total[5]),
        pack<T>(total[6], total[7])};
    if (d == 0 && params.lse != nullptr) {
      const float value = maximum == -INFINITY ? maximum : maximum + logf(sum);
      write_lse(params, in_batch, tile.head, exists ? value : NAN);
    }
  }
}

// Two parts are what histories of a thousand keys or so get; what the code for more steps over
// there costs as much as what it does.
template <class S>
__device__ inline void finish_split(Shared<S>& shared, const Params& params, int rank) {
  if (params.parts.divisor() == 2) {
    finish_rows<S, 2>(shared, params, rank);
  } else {
    finish_rows<S, AttentionConfig::kMaxParts>(shared, params, rank);
  }
}

}  // namespace ikbo::attention
