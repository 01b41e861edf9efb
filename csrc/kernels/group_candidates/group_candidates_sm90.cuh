// Stable counting sort of candidates by user, on the device.
//
// A pass sorts by one 8-bit digit. Each warp owns 32 * kSteps consecutive rows and takes them 32 at a
// time, so "earlier row" is "earlier warp, earlier step, lower lane" and the sort is stable without
// atomics: within a step __match_any_sync finds the lanes that share a digit, and a lane's rank among
// them is the count of lower ones. A warp's counts live in shared memory and belong to it alone. All
// of a thread's rows are loaded before the first is ranked: one trip to memory a pass, not kSteps.
#pragma once

#include <cstdint>

#include "config/group_candidates.h"

namespace ikbo::group {

using Config = GroupCandidatesConfig;
inline constexpr int kDigits = Config::kDigits;
inline constexpr int kSteps = Config::kSteps;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// Where a pass reads: the first from the map, later ones from the pass before.
struct Source {
  const int32_t* cand_to_user;  // first pass; null later
  const uint32_t* keys;         // later passes
  const int32_t* rows;          // later passes: the row each key came from
  uint32_t n_users;

  // 0 ... n_users - 1, or n_users for a row without a user (negative values wrap above it).
  __device__ uint32_t key(int64_t i) const {
    return cand_to_user ? min(static_cast<uint32_t>(cand_to_user[i]), n_users) : keys[i];
  }
  __device__ int32_t row(int64_t i) const {
    return cand_to_user ? static_cast<int32_t>(i) : rows[i];
  }
};

struct Sink {
  uint32_t* keys;  // null where nobody reads them
  int32_t* rows;
};

// Passes write the two halves in turn. Null where there is one pass. (Chosen by a conditional: a
// run-time index into kernel parameters would move them to local memory.)
struct Scratch {
  uint32_t *even_keys, *odd_keys;
  int32_t *even_rows, *odd_rows;
  uint32_t* histogram;  // [digit][tile], then a total a digit

  __host__ __device__ uint32_t* keys(int pass) const { return pass % 2 ? odd_keys : even_keys; }
  __host__ __device__ int32_t* rows(int pass) const { return pass % 2 ? odd_rows : even_rows; }
};

__device__ inline Source source_of_pass(int pass, const int32_t* cand_to_user,
                                        const Scratch& scratch, uint32_t n_users) {
  if (pass == 0) return {cand_to_user, nullptr, nullptr, n_users};
  return {nullptr, scratch.keys(pass - 1), scratch.rows(pass - 1), n_users};
}

template <int kWarps>
struct Shared {
  uint32_t counts[kWarps][kDigits];  // per warp: how many rows of each digit, then those before it
  uint32_t digit_base[kDigits];      // where the CTA's rows of each digit go
};

// A thread's share of a tile.
struct ThreadRows {
  uint32_t keys[kSteps];
  uint32_t ranks[kSteps];  // among the warp's rows of the same digit
};

__device__ inline uint32_t digit_of(uint32_t key, int pass) {
  return (key >> (Config::kDigitBits * pass)) & (kDigits - 1);
}

__device__ inline int64_t row_of_step(int64_t tile_begin, int step) {
  return tile_begin + (threadIdx.x / 32) * (32 * kSteps) + 32 * step + threadIdx.x % 32;
}

// Loads and ranks the rows of the tile that are below `end`. Afterwards counts[w][d] is complete for
// every warp; all threads take part and leave synchronised.
template <int kWarps>
__device__ inline void rank_rows(Shared<kWarps>& shared, ThreadRows& mine, const Source& source,
                                 int64_t tile_begin, int64_t end, int pass) {
  uint32_t* counts = shared.counts[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int64_t i = row_of_step(tile_begin, s);
    mine.keys[s] = i < end ? source.key(i) : 0;
  }
#pragma unroll
  for (int d = lane; d < kDigits; d += 32) counts[d] = 0;
  __syncwarp();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const bool live = row_of_step(tile_begin, s) < end;
    // Lanes past the end match only each other: no digit is kDigits.
    const uint32_t digit = live ? digit_of(mine.keys[s], pass) : kDigits;
    const unsigned peers = __match_any_sync(kAllLanes, digit);
    const unsigned lower = peers & ((1u << lane) - 1);
    const uint32_t before = live ? counts[digit] : 0;
    mine.ranks[s] = before + __popc(lower);
    __syncwarp();  // all lanes have read the count before a leader moves it
    if (live && lower == 0) counts[digit] = before + __popc(peers);
    __syncwarp();
  }
  __syncthreads();
}

// For one digit (a thread each): the sum over warps, each count replaced by the sum before it.
template <int kWarps>
__device__ inline uint32_t scan_warps(Shared<kWarps>& shared, int digit) {
  uint32_t total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const uint32_t count = shared.counts[w][digit];
    shared.counts[w][digit] = total;
    total += count;
  }
  return total;
}

// Inclusive prefix sum over the warp's lanes.
__device__ inline uint32_t scan_lanes(uint32_t value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

// First warp: exclusive prefix sum of a count a digit. `counts` may be `sums`.
__device__ inline void scan_digits(const uint32_t* counts, uint32_t* sums) {
  const int lane = threadIdx.x;
  constexpr int kPerLane = kDigits / 32;
  uint32_t before[kPerLane], sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    before[i] = sum;
    sum += counts[lane * kPerLane + i];
  }
  const uint32_t base = scan_lanes(sum) - sum;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sums[lane * kPerLane + i] = base + before[i];
}

template <int kWarps>
__device__ inline void scatter(const Shared<kWarps>& shared, const ThreadRows& mine,
                               const Source& source, const Sink& sink, int64_t tile_begin,
                               int64_t end, int pass) {
  const uint32_t* before = shared.counts[threadIdx.x / 32];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int64_t i = row_of_step(tile_begin, s);
    if (i < end) {
      const uint32_t digit = digit_of(mine.keys[s], pass);
      const uint32_t position = shared.digit_base[digit] + before[digit] + mine.ranks[s];
      sink.rows[position] = source.row(i);
      if (sink.keys) sink.keys[position] = mine.keys[s];
    }
  }
}

// How many of the sorted keys are below `user`.
__device__ inline int32_t lower_bound(const uint32_t* keys, int64_t rows, uint32_t user) {
  int64_t low = 0, high = rows;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] < user) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return static_cast<int32_t>(low);
}

// One CTA sorts at most kSingleCtaRows rows, all passes in one launch.
inline constexpr int kSingleWarps = Config::kSingleCtaRows / (32 * kSteps);

__global__ void __launch_bounds__(32 * kSingleWarps, 1)
    group_candidates_single_sm90(const int32_t* cand_to_user, int32_t* order, int32_t* user_offsets,
                                 Scratch scratch, int64_t rows, uint32_t n_users, int passes) {
  __shared__ Shared<kSingleWarps> shared;
  extern __shared__ uint32_t sorted_keys[];  // [rows] where passes > 1: the offsets' search is here
  ThreadRows mine;
  for (int pass = 0; pass < passes; ++pass) {
    const Source source = source_of_pass(pass, cand_to_user, scratch, n_users);
    rank_rows(shared, mine, source, 0, rows, pass);
    if (threadIdx.x < kDigits) shared.digit_base[threadIdx.x] = scan_warps(shared, threadIdx.x);
    __syncthreads();
    if (threadIdx.x < 32) scan_digits(shared.digit_base, shared.digit_base);
    __syncthreads();
    const bool last = pass + 1 == passes;
    const Sink sink = last ? Sink{passes > 1 ? sorted_keys : nullptr, order}
                           : Sink{scratch.keys(pass), scratch.rows(pass)};
    scatter(shared, mine, source, sink, 0, rows, pass);
    if (passes == 1 && threadIdx.x <= n_users) {
      user_offsets[threadIdx.x] = static_cast<int32_t>(shared.digit_base[threadIdx.x]);
    }
    __syncthreads();  // the next pass reads what other warps wrote
  }
  if (passes > 1) {
    for (uint32_t u = threadIdx.x; u <= n_users; u += blockDim.x) {
      user_offsets[u] = lower_bound(sorted_keys, rows, u);
    }
  }
}

// Tiled form, three launches a pass. First: histogram[d][tile].
inline constexpr int kTileWarps = Config::kTileRows / (32 * kSteps);

__global__ void __launch_bounds__(32 * kTileWarps, 2)
    group_candidates_histogram_sm90(const int32_t* cand_to_user, Scratch scratch, int64_t rows,
                                    uint32_t n_users, int pass) {
  __shared__ Shared<kTileWarps> shared;
  ThreadRows mine;
  rank_rows(shared, mine, source_of_pass(pass, cand_to_user, scratch, n_users),
            int64_t{blockIdx.x} * Config::kTileRows, rows, pass);
  if (threadIdx.x < kDigits) {
    scratch.histogram[int64_t{threadIdx.x} * gridDim.x + blockIdx.x] =
        scan_warps(shared, threadIdx.x);
  }
}

// Second, a warp a digit: each tile's count becomes the sum of the tiles before it; the totals follow
// the histogram.
__global__ void __launch_bounds__(128)
    group_candidates_scan_sm90(uint32_t* histogram, int64_t tiles) {
  const int lane = threadIdx.x % 32;
  const int digit = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  uint32_t* counts = histogram + digit * tiles;
  uint32_t total = 0;
  for (int64_t first = 0; first < tiles; first += 32) {
    const bool live = first + lane < tiles;
    const uint32_t count = live ? counts[first + lane] : 0;
    const uint32_t through = scan_lanes(count);
    if (live) counts[first + lane] = total + through - count;
    total += __shfl_sync(kAllLanes, through, 31);
  }
  if (lane == 0) histogram[kDigits * tiles + digit] = total;
}

// Third: every tile scatters to where its rows of each digit begin. With one pass a digit is a user,
// so the first tile also has the users' offsets.
__global__ void __launch_bounds__(32 * kTileWarps, 2)
    group_candidates_scatter_sm90(const int32_t* cand_to_user, int32_t* order,
                                  int32_t* user_offsets, Scratch scratch, int64_t rows,
                                  uint32_t n_users, int pass, int passes) {
  __shared__ Shared<kTileWarps> shared;
  ThreadRows mine;
  const int64_t begin = int64_t{blockIdx.x} * Config::kTileRows;
  const Source source = source_of_pass(pass, cand_to_user, scratch, n_users);
  rank_rows(shared, mine, source, begin, rows, pass);
  if (threadIdx.x < kDigits) scan_warps(shared, threadIdx.x);
  if (threadIdx.x < 32) {
    scan_digits(scratch.histogram + int64_t{kDigits} * gridDim.x, shared.digit_base);
  }
  __syncthreads();
  if (threadIdx.x < kDigits) {
    if (passes == 1 && blockIdx.x == 0 && threadIdx.x <= n_users) {
      user_offsets[threadIdx.x] = static_cast<int32_t>(shared.digit_base[threadIdx.x]);
    }
    shared.digit_base[threadIdx.x] +=
        scratch.histogram[int64_t{threadIdx.x} * gridDim.x + blockIdx.x];
  }
  __syncthreads();
  const bool last = pass + 1 == passes;
  const Sink sink{passes > 1 ? scratch.keys(pass) : nullptr, last ? order : scratch.rows(pass)};
  scatter(shared, mine, source, sink, begin, rows, pass);
}

// After several passes: a thread a user searches the sorted keys.
__global__ void __launch_bounds__(256)
    group_candidates_offsets_sm90(const uint32_t* keys, int64_t rows, int32_t* user_offsets,
                                  uint32_t n_users) {
  const int64_t u = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (u <= n_users) user_offsets[u] = lower_bound(keys, rows, static_cast<uint32_t>(u));
}

}  // namespace ikbo::group
