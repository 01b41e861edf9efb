// Stable counting sort of candidates by user, on the device.
//
// A pass sorts by one 8-bit digit. Each warp owns a contiguous range of rows and walks it 32 at a
// time, so "earlier row" is "earlier warp, earlier step, lower lane" and the sort is stable without
// atomics: within a step __match_any_sync finds the lanes that share a digit, and a lane's rank among
// them is the count of lower ones. Counts of a warp live in shared memory and belong to it alone.
#pragma once

#include <cstdint>

#include "config/group_candidates.h"

namespace ikbo::group {

using Config = GroupCandidatesConfig;
inline constexpr int kWarps = Config::kThreads / 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// Where a pass reads its keys: the first from the map, later ones from the pass before.
struct Source {
  const int32_t* cand_to_user;  // first pass; null later
  const uint32_t* keys;         // later passes
  const int32_t* rows;          // later passes: the row each key came from
  uint32_t n_users;

  // 0 ... n_users - 1, or n_users for a row without a user (negative values wrap above it).
  __device__ uint32_t key(int64_t i) const {
    return cand_to_user ? min(static_cast<uint32_t>(cand_to_user[i]), n_users) : keys[i];
  }
  __device__ int32_t row(int64_t i) const { return cand_to_user ? static_cast<int32_t>(i) : rows[i]; }
};

struct Sink {
  uint32_t* keys;  // null in the last pass
  int32_t* rows;
};

struct Shared {
  uint32_t counts[kWarps][Config::kDigits];  // per warp: count, then next position, of each digit
  uint32_t digit_totals[Config::kDigits];    // then their exclusive prefix sum
};

__device__ inline uint32_t digit_of(uint32_t key, int pass) {
  return (key >> (Config::kDigitBits * pass)) & (Config::kDigits - 1);
}

// The rows [begin, end) of the CTA, cut into one contiguous range a warp, whole steps of 32.
struct WarpRange {
  int64_t begin, end;
};
__device__ inline WarpRange warp_range(int64_t begin, int64_t end) {
  const int64_t step = (end - begin + kWarps * 32 - 1) / (kWarps * 32) * 32;
  const int64_t first = begin + step * (threadIdx.x / 32);
  return {min(first, end), min(first + step, end)};
}

// shared.counts[w][d] = rows of warp w with digit d; all threads, ends synchronised.
__device__ inline void count_digits(Shared& shared, const Source& source, WarpRange range, int pass) {
  uint32_t* counts = shared.counts[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  for (int d = lane; d < Config::kDigits; d += 32) counts[d] = 0;
  __syncwarp();
  for (int64_t i = range.begin + lane; i - lane < range.end; i += 32) {
    const bool live = i < range.end;
    // Lanes past the end match only each other (the key is wider than a digit).
    const uint32_t digit = live ? digit_of(source.key(i), pass) : Config::kDigits;
    const unsigned peers = __match_any_sync(kAllLanes, digit);
    if (live && (peers & ((1u << lane) - 1)) == 0) counts[digit] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
}

// Thread d < 256: the sum over warps of counts[.][d], each count replaced by the sum before it.
__device__ inline uint32_t scan_warps(Shared& shared, int digit) {
  uint32_t total = 0;
  for (int w = 0; w < kWarps; ++w) {
    const uint32_t count = shared.counts[w][digit];
    shared.counts[w][digit] = total;
    total += count;
  }
  return total;
}

// Turns digit_totals into their exclusive prefix sum. First warp only.
__device__ inline void scan_digits(Shared& shared) {
  const int lane = threadIdx.x;
  constexpr int kPerLane = Config::kDigits / 32;
  uint32_t mine[kPerLane], sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    mine[i] = sum;
    sum += shared.digit_totals[lane * kPerLane + i];
  }
  uint32_t before = sum;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, before, offset);
    if (lane >= offset) before += other;
  }
  before -= sum;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) shared.digit_totals[lane * kPerLane + i] = before + mine[i];
}

// Writes each row of the range to base(digit) + counts[warp][digit] + rank, in order.
__device__ inline void scatter(Shared& shared, const Source& source, const Sink& sink,
                               WarpRange range, int pass) {
  uint32_t* next = shared.counts[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  for (int64_t i = range.begin + lane; i - lane < range.end; i += 32) {
    const bool live = i < range.end;
    const uint32_t key = live ? source.key(i) : 0;
    const uint32_t digit = live ? digit_of(key, pass) : Config::kDigits;
    const unsigned peers = __match_any_sync(kAllLanes, digit);
    const unsigned lower = peers & ((1u << lane) - 1);
    if (live) {
      const int64_t position =
          int64_t{shared.digit_totals[digit]} + next[digit] + __popc(lower);
      sink.rows[position] = source.row(i);
      if (sink.keys) sink.keys[position] = key;
    }
    __syncwarp();  // all lanes have read next[] before a leader moves it
    if (live && lower == 0) next[digit] += __popc(peers);
    __syncwarp();
  }
}

// offsets[u] = how many of the sorted keys are below u.
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

// Passes write the two halves in turn. Null where there is one pass. (Chosen by a conditional: a
// run-time index into kernel parameters would move them to local memory.)
struct Scratch {
  uint32_t *even_keys, *odd_keys;
  int32_t *even_rows, *odd_rows;
  uint32_t* histogram;  // [digit][tile]

  __host__ __device__ uint32_t* keys(int pass) const { return pass % 2 ? odd_keys : even_keys; }
  __host__ __device__ int32_t* rows(int pass) const { return pass % 2 ? odd_rows : even_rows; }
};

__device__ inline Source source_of_pass(int pass, const int32_t* cand_to_user,
                                        const Scratch& scratch, uint32_t n_users) {
  if (pass == 0) return {cand_to_user, nullptr, nullptr, n_users};
  return {nullptr, scratch.keys(pass - 1), scratch.rows(pass - 1), n_users};
}

// Keys are kept after the last pass too where the offsets are searched in them.
__device__ inline Sink sink_of_pass(int pass, int passes, int32_t* order, const Scratch& scratch) {
  if (passes == 1) return {nullptr, order};
  return {scratch.keys(pass), pass + 1 == passes ? order : scratch.rows(pass)};
}

// One CTA, all passes.
__global__ void __launch_bounds__(Config::kThreads, 1)
    group_candidates_single_sm90(const int32_t* cand_to_user, int32_t* order, int32_t* user_offsets,
                                 Scratch scratch, int64_t rows, uint32_t n_users, int passes) {
  __shared__ Shared shared;
  const WarpRange range = warp_range(0, rows);
  for (int pass = 0; pass < passes; ++pass) {
    const Source source = source_of_pass(pass, cand_to_user, scratch, n_users);
    count_digits(shared, source, range, pass);
    if (threadIdx.x < Config::kDigits) {
      shared.digit_totals[threadIdx.x] = scan_warps(shared, threadIdx.x);
    }
    __syncthreads();
    if (threadIdx.x < 32) scan_digits(shared);
    __syncthreads();
    if (passes == 1 && threadIdx.x <= n_users) {
      user_offsets[threadIdx.x] = static_cast<int32_t>(shared.digit_totals[threadIdx.x]);
    }
    scatter(shared, source, sink_of_pass(pass, passes, order, scratch), range, pass);
    __syncthreads();  // the next pass reads what other warps wrote
  }
  if (passes > 1) {
    const uint32_t* keys = scratch.keys(passes - 1);
    for (uint32_t u = threadIdx.x; u <= n_users; u += Config::kThreads) {
      user_offsets[u] = lower_bound(keys, rows, u);
    }
  }
}

// Tiled form, three launches a pass. First: histogram[d][tile].
__global__ void __launch_bounds__(Config::kThreads, 1)
    group_candidates_histogram_sm90(const int32_t* cand_to_user, Scratch scratch, int64_t rows,
                                    uint32_t n_users, int pass) {
  __shared__ Shared shared;
  const int64_t begin = int64_t{blockIdx.x} * Config::kTileRows;
  const WarpRange range = warp_range(begin, min(begin + Config::kTileRows, rows));
  count_digits(shared, source_of_pass(pass, cand_to_user, scratch, n_users), range, pass);
  if (threadIdx.x < Config::kDigits) {
    scratch.histogram[int64_t{threadIdx.x} * gridDim.x + blockIdx.x] =
        scan_warps(shared, threadIdx.x);
  }
}

// Second, one CTA: the histogram becomes its exclusive prefix sum, digit by digit, tile by tile.
__global__ void __launch_bounds__(Config::kThreads, 1)
    group_candidates_scan_sm90(uint32_t* histogram, int64_t tiles, int32_t* user_offsets,
                               uint32_t n_users) {
  __shared__ uint32_t warp_sums[kWarps];
  const int64_t words = Config::kDigits * tiles;
  const int64_t each = (words + Config::kThreads - 1) / Config::kThreads;
  const int64_t begin = min(each * threadIdx.x, words), end = min(begin + each, words);
  uint32_t sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += histogram[i];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t before = sum;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, before, offset);
    if (lane >= offset) before += other;
  }
  if (lane == 31) warp_sums[warp] = before;
  __syncthreads();
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  before -= sum;
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t count = histogram[i];
    histogram[i] = before;
    // The first tile's entry of a digit is where that digit, here that user, begins.
    if (user_offsets && i % tiles == 0 && i / tiles <= n_users) {
      user_offsets[i / tiles] = static_cast<int32_t>(before);
    }
    before += count;
  }
}

// Third: every tile scatters from its own offsets.
__global__ void __launch_bounds__(Config::kThreads, 1)
    group_candidates_scatter_sm90(const int32_t* cand_to_user, int32_t* order, Scratch scratch,
                                  int64_t rows, uint32_t n_users, int pass, int passes) {
  __shared__ Shared shared;
  const int64_t begin = int64_t{blockIdx.x} * Config::kTileRows;
  const WarpRange range = warp_range(begin, min(begin + Config::kTileRows, rows));
  const Source source = source_of_pass(pass, cand_to_user, scratch, n_users);
  count_digits(shared, source, range, pass);
  if (threadIdx.x < Config::kDigits) {
    scan_warps(shared, threadIdx.x);
    shared.digit_totals[threadIdx.x] =
        scratch.histogram[int64_t{threadIdx.x} * gridDim.x + blockIdx.x];
  }
  __syncthreads();
  scatter(shared, source, sink_of_pass(pass, passes, order, scratch), range, pass);
}

// After several passes: a thread a user searches the sorted keys.
__global__ void __launch_bounds__(256)
    group_candidates_offsets_sm90(const uint32_t* keys, int64_t rows, int32_t* user_offsets,
                                  uint32_t n_users) {
  const int64_t u = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (u <= n_users) user_offsets[u] = lower_bound(keys, rows, static_cast<uint32_t>(u));
}

}  // namespace ikbo::group
