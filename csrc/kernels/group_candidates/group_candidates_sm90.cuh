// Stable counting sort of candidates by user, on the device.
//
// A pass sorts by one 8-bit digit. Each warp owns 32 * kSteps consecutive rows and takes them 32 at
// a time, so "earlier row" is "earlier warp, earlier step, lower lane" and the sort is stable
// without atomics: within a step eight ballots find the lanes that share a digit, and a lane's rank
// among them is the count of lower ones. (__match_any_sync in their place took three times as long
// on an H200 where the lanes of a warp hold many users.) A warp's counts live in shared memory and
// belong to it alone. All of a thread's rows are loaded before the first is ranked: one trip to
// memory a pass, not kSteps.
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

// What a CTA holds of its tile. Rows are put in order here first, so that they leave as runs and
// not one by one: scattered 4-byte stores cost an SM a cycle each.
template <int kWarps>
struct Shared {
  static constexpr int kRows = 32 * kSteps * kWarps;
  uint32_t counts[kWarps][kDigits];  // per warp: how many rows of each digit, then those before it
  uint32_t digit_begin[kDigits];     // where each digit begins in the sorted tile
  uint32_t digit_shift[kDigits];     // from there to where it goes in the sorted batch
  uint32_t keys[kRows];              // the sorted tile
  int32_t rows[kRows];
};

// The rows of a tile, spread over all warps: each takes `steps` times 32 consecutive ones.
struct TileRows {
  int64_t begin;
  int count;
  int steps;

  __device__ TileRows(int64_t begin_, int64_t end) : begin(begin_) {
    count = static_cast<int>(end - begin);
    steps = (count + blockDim.x - 1) / blockDim.x;
  }
  // Of the tile; at or past `count` where the thread has no row in this step.
  __device__ int row(int step) const {
    return (threadIdx.x / 32) * (32 * steps) + 32 * step + threadIdx.x % 32;
  }
};

__device__ inline uint32_t digit_of(uint32_t key, int pass) {
  return (key >> (Config::kDigitBits * pass)) & (kDigits - 1);
}

// The lanes that are live and hold the caller's digit.
__device__ inline unsigned lanes_with_digit(uint32_t digit, bool live) {
  unsigned lanes = __ballot_sync(kAllLanes, live);
#pragma unroll
  for (int bit = 0; bit < Config::kDigitBits; ++bit) {
    const bool set = (digit >> bit) & 1;
    const unsigned with_bit = __ballot_sync(kAllLanes, set);
    lanes &= set ? with_bit : ~with_bit;
  }
  return lanes;
}

// A thread's keys, and each one's rank among the warp's rows of the same digit.
struct ThreadRows {
  uint32_t keys[kSteps];
  uint32_t ranks[kSteps];
};

// Loads and ranks the tile. Afterwards counts[w][d] is complete for every warp; all threads take
// part and leave synchronised.
template <int kWarps>
__device__ inline void rank_rows(Shared<kWarps>& shared, ThreadRows& mine, const Source& source,
                                 const TileRows& tile, int pass) {
  uint32_t* counts = shared.counts[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const bool live = s < tile.steps && tile.row(s) < tile.count;
    mine.keys[s] = live ? source.key(tile.begin + tile.row(s)) : 0;
  }
#pragma unroll
  for (int d = lane; d < kDigits; d += 32) counts[d] = 0;
  __syncwarp();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (s >= tile.steps) break;
    const bool live = tile.row(s) < tile.count;
    const uint32_t digit = digit_of(mine.keys[s], pass);
    const unsigned peers = lanes_with_digit(digit, live);
    const unsigned lower = peers & ((1u << lane) - 1);
    const uint32_t before = counts[digit];
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

// From ranks to the sorted tile in shared memory. All threads take part and leave synchronised.
template <int kWarps>
__device__ inline void sort_tile(Shared<kWarps>& shared, const ThreadRows& mine,
                                 const Source& source, const TileRows& tile, int pass) {
  if (threadIdx.x < kDigits) shared.digit_begin[threadIdx.x] = scan_warps(shared, threadIdx.x);
  __syncthreads();
  if (threadIdx.x < 32) scan_digits(shared.digit_begin, shared.digit_begin);
  __syncthreads();
  const uint32_t* before = shared.counts[threadIdx.x / 32];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (s < tile.steps && tile.row(s) < tile.count) {
      const uint32_t digit = digit_of(mine.keys[s], pass);
      const uint32_t place = shared.digit_begin[digit] + before[digit] + mine.ranks[s];
      shared.keys[place] = mine.keys[s];
      shared.rows[place] = source.row(tile.begin + tile.row(s));
    }
  }
  __syncthreads();
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
using SingleShared = Shared<Config::kSingleCtaRows / (32 * kSteps)>;
inline constexpr int kSingleThreads = Config::kSingleCtaRows / kSteps;

__global__ void __launch_bounds__(kSingleThreads, 1)
    group_candidates_single_sm90(const int32_t* cand_to_user, int32_t* order, int32_t* user_offsets,
                                 Scratch scratch, int64_t rows, uint32_t n_users, int passes) {
  extern __shared__ char shared_bytes[];
  SingleShared& shared = *reinterpret_cast<SingleShared*>(shared_bytes);
  ThreadRows mine;
  const TileRows tile(0, rows);
  for (int pass = 0; pass < passes; ++pass) {
    const Source source = source_of_pass(pass, cand_to_user, scratch, n_users);
    rank_rows(shared, mine, source, tile, pass);
    sort_tile(shared, mine, source, tile, pass);
    const bool last = pass + 1 == passes;
    const Sink sink{last ? nullptr : scratch.keys(pass), last ? order : scratch.rows(pass)};
    for (int i = threadIdx.x; i < tile.count; i += kSingleThreads) {
      sink.rows[i] = shared.rows[i];
      if (sink.keys) sink.keys[i] = shared.keys[i];
    }
    __syncthreads();  // the next pass reads what other warps wrote
  }
  if (passes == 1) {
    if (threadIdx.x <= n_users) {
      user_offsets[threadIdx.x] = static_cast<int32_t>(shared.digit_begin[threadIdx.x]);
    }
    return;
  }
  for (uint32_t u = threadIdx.x; u <= n_users; u += kSingleThreads) {
    user_offsets[u] = lower_bound(shared.keys, rows, u);
  }
}

// Tiled form, three launches a pass. First: histogram[d][tile].
using TileShared = Shared<Config::kTileRows / (32 * kSteps)>;
inline constexpr int kTileThreads = Config::kTileRows / kSteps;

__device__ inline TileRows tile_of_block(int64_t rows) {
  const int64_t begin = int64_t{blockIdx.x} * Config::kTileRows;
  return TileRows(begin, min(begin + Config::kTileRows, rows));
}

__global__ void __launch_bounds__(kTileThreads, 2)
    group_candidates_histogram_sm90(const int32_t* cand_to_user, Scratch scratch, int64_t rows,
                                    uint32_t n_users, int pass) {
  extern __shared__ char shared_bytes[];
  TileShared& shared = *reinterpret_cast<TileShared*>(shared_bytes);
  ThreadRows mine;
  rank_rows(shared, mine, source_of_pass(pass, cand_to_user, scratch, n_users), tile_of_block(rows),
            pass);
  if (threadIdx.x < kDigits) {
    scratch.histogram[int64_t{threadIdx.x} * gridDim.x + blockIdx.x] =
        scan_warps(shared, threadIdx.x);
  }
}

// Second, a warp a digit: each tile's count becomes the sum of the tiles before it; the totals
// follow the histogram.
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

// Third: every tile sends its runs to where its rows of each digit begin. With one pass a digit is
// a user, so the first tile also has the users' offsets.
__global__ void __launch_bounds__(kTileThreads, 2)
    group_candidates_scatter_sm90(const int32_t* cand_to_user, int32_t* order,
                                  int32_t* user_offsets, Scratch scratch, int64_t rows,
                                  uint32_t n_users, int pass, int passes) {
  extern __shared__ char shared_bytes[];
  TileShared& shared = *reinterpret_cast<TileShared*>(shared_bytes);
  ThreadRows mine;
  const TileRows tile = tile_of_block(rows);
  const Source source = source_of_pass(pass, cand_to_user, scratch, n_users);
  rank_rows(shared, mine, source, tile, pass);
  if (threadIdx.x < 32) {
    scan_digits(scratch.histogram + int64_t{kDigits} * gridDim.x, shared.digit_shift);
  }
  sort_tile(shared, mine, source, tile, pass);
  if (threadIdx.x < kDigits) {
    const uint32_t digit = threadIdx.x;
    if (passes == 1 && blockIdx.x == 0 && digit <= n_users) {
      user_offsets[digit] = static_cast<int32_t>(shared.digit_shift[digit]);
    }
    shared.digit_shift[digit] +=
        scratch.histogram[int64_t{digit} * gridDim.x + blockIdx.x] - shared.digit_begin[digit];
  }
  __syncthreads();
  const Sink sink{passes > 1 ? scratch.keys(pass) : nullptr,
                  pass + 1 == passes ? order : scratch.rows(pass)};
  for (int i = threadIdx.x; i < tile.count; i += kTileThreads) {
    const uint32_t key = shared.keys[i];
    const uint32_t place = i + shared.digit_shift[digit_of(key, pass)];
    sink.rows[place] = shared.rows[i];
    if (sink.keys) sink.keys[place] = key;
  }
}

// After several passes: a thread a user searches the sorted keys.
__global__ void __launch_bounds__(256)
    group_candidates_offsets_sm90(const uint32_t* keys, int64_t rows, int32_t* user_offsets,
                                  uint32_t n_users) {
  const int64_t u = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (u <= n_users) user_offsets[u] = lower_bound(keys, rows, static_cast<uint32_t>(u));
}

}  // namespace ikbo::group
