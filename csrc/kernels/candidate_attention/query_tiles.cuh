// Which query rows a CTA works on. All query rows of a user's candidates are one run (there is no
// mask between candidates, so a tile needs no candidate's borders); each run is cut into tiles of
// its own.
#pragma once

#include <cstdint>

#include "config/fast_divisor.h"
#include "hopper/mbarrier.cuh"

namespace ikbo::attention {

// The rows of one tile and the keys they attend to.
struct QueryTile {
  int32_t head;                      // -1: there is no more tile
  int32_t first_row;                 // of B * S, grouped by user
  int32_t rows;                      // at most kTileM; of a wrong guess, less than 0
  int32_t kv_batch, kv_row, kv_len;  // keys kv_row ... of the batch item; kv_len < 0: not in range
  int32_t part;                      // where keys are cut: of all tiles' parts

  __device__ bool is_last() const { return head < 0; }
  // Those that are loaded before the tile is known to be the CTA's: `blocks` and no more.
  __device__ int32_t early_keys(int32_t blocks, int32_t tile_n) const {
    return is_last() ? 0 : min(kv_len, blocks * tile_n);
  }
  // What was loaded early is all there is of it, for no rows.
  __device__ void give_up(int32_t blocks, int32_t tile_n) {
    kv_len = early_keys(blocks, tile_n);
    rows = -rows;
  }
  // Of a wrong guess, whether q of rows from `row` on was loaded.
  __device__ bool loaded_in_vain(int32_t row) const { return -rows > row; }
  __device__ int32_t key_tiles(int32_t tile_n) const {
    return kv_len <= 0 ? 0 : (kv_len + tile_n - 1) / tile_n;
  }
  // The first of `blocks` that is in a part; times kMaxParts they stay in 32 bits.
  __device__ static int32_t first_of_part(uint32_t index, uint32_t parts, uint32_t blocks) {
    return static_cast<int32_t>(index * blocks / parts);
  }
  __device__ static bool part_has_blocks(uint32_t index, uint32_t parts, uint32_t blocks) {
    return first_of_part(index, parts, blocks) < first_of_part(index + 1, parts, blocks);
  }
  // Cuts the keys down to one part of them, whole key tiles.
  __device__ void take_part(uint32_t index, uint32_t parts, int32_t tile_n) {
    if (kv_len <= 0) return;
    const int32_t blocks = key_tiles(tile_n);
    const int32_t first = first_of_part(index, parts, blocks) * tile_n;
    const int32_t end = first_of_part(index + 1, parts, blocks) * tile_n;
    kv_row += first;
    kv_len = min(kv_len, end) - first;
  }
};

// Candidates spread evenly over users: then a CTA's first tile is known without any memory.
struct Guess {
  bool is_likely;
  FastDivisor tiles;  // of a user and head
  FastDivisor heads;
  int32_t candidates;  // of a user
};

// What gives users their runs and their keys.
struct UserRuns {
  const int32_t* user_offsets;  // [U + 1], in candidates
  const int32_t* order;         // [B] candidates grouped by user, or null where they are
  // Rows of a flat K and V, [U] with kv_len and [U + 1] without, or null: user u has batch item u.
  const int32_t* kv_start;
  const int32_t* kv_len;  // [U], or null: all L, or up to the next user's start
  int32_t U, B, H;
  FastDivisor S;
  int32_t L;  // rows of a batch item; of flat K and V, all of them

  __device__ int32_t all_rows() const { return B * S.divisor(); }

  // Where a row of those grouped by user is among the rows of the batch; all_rows() and more:
  // nowhere.
  __device__ int32_t row_of_batch(int32_t row) const {
    if (order == nullptr) return row;
    const int32_t candidate = S.divide(row);
    if (candidate >= B) return all_rows();
    const int32_t in_batch = order[candidate];
    return in_batch < 0 || in_batch >= B ? all_rows()
                                         : in_batch * S.divisor() + S.remainder(row, candidate);
  }
  // Whether the first `users` have so many candidates each. A whole warp; one trip to memory for
  // 127 of them.
  __device__ bool are_even(int32_t users, int32_t candidates) const {
    constexpr int kAtOnce = 4;
    bool even = true;
#pragma unroll 1
    for (int32_t first = 0; first <= users; first += kAtOnce * 32) {
      int32_t user[kAtOnce], offset[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        user[i] = min(first + i * 32 + static_cast<int32_t>(threadIdx.x % 32), users);
        offset[i] = user_offsets[user[i]];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) even &= offset[i] == user[i] * candidates;
    }
    return __all_sync(0xffffffffu, even);
  }
};

// Tile `index` as TileFinder finds it, if the guess holds up to its user, who is its kv_batch.
template <int kTileM>
__device__ inline QueryTile guessed_tile(const UserRuns& runs, const Guess& guess, int32_t index) {
  QueryTile tile{};
  tile.head = -1;
  if (!guess.is_likely) return tile;
  const int32_t of_head = guess.tiles.divide(index), user = guess.heads.divide(of_head);
  if (user >= runs.U) return tile;
  const int32_t rows = guess.candidates * runs.S.divisor();
  const int32_t row = guess.tiles.remainder(index, of_head) * kTileM;
  tile.head = guess.heads.remainder(of_head, user);
  tile.first_row = user * rows + row;
  tile.rows = min(kTileM, rows - row);
  tile.kv_batch = user;
  tile.kv_len = runs.L;
  return tile;
}

// A warp's view of the tiles of all runs, in the order of users and each user's heads. Neighbouring
// tiles have the same keys, so CTAs that take neighbours share them in L2. Where asked for, of each
// 32 users those with the longest histories come first: CTAs that take the next tile when they are
// free end closer together.
template <int kTileM>
class TileFinder {
 public:
  __device__ explicit TileFinder(const UserRuns& runs, bool longest_first = false)
      : runs_(runs), longest_first_(longest_first) {
    load(0, 0);
  }

  // Tile `index`, no smaller than the last call's. All lanes.
  __device__ QueryTile find(int32_t index) {
    QueryTile tile{};
    while (index >= before_ + __shfl_sync(0xffffffffu, inclusive_, 31)) {
      if (first_user_ + 32 > runs_.U) {
        tile.head = -1;
        return tile;
      }
      load(first_user_ + 32, before_ + __shfl_sync(0xffffffffu, inclusive_, 31));
    }
    const uint32_t past = __ballot_sync(0xffffffffu, before_ + inclusive_ > index);
    const int owner = __ffs(static_cast<int>(past)) - 1;
    const int32_t tiles = __shfl_sync(0xffffffffu, tiles_, owner);
    const int32_t of_user =
        index - before_ - (__shfl_sync(0xffffffffu, inclusive_, owner) - tiles * runs_.H);
    const int32_t first_row = __shfl_sync(0xffffffffu, first_candidate_, owner) * runs_.S.divisor();
    const int32_t rows = __shfl_sync(0xffffffffu, candidates_, owner) * runs_.S.divisor();
    tile.head = of_user / tiles;
    const int32_t row = of_user % tiles * kTileM;
    tile.first_row = first_row + row;
    tile.rows = min(kTileM, rows - row);
    int32_t user = first_user_ + owner;
    if (longest_first_) user = __shfl_sync(0xffffffffu, user_, owner);
    if (user == runs_.U) return tile;  // no keys
    tile.kv_batch = runs_.kv_start != nullptr ? 0 : user;
    tile.kv_row = __shfl_sync(0xffffffffu, kv_row_, owner);
    tile.kv_len = __shfl_sync(0xffffffffu, kv_len_, owner);
    const bool in_range =
        tile.kv_len >= 0 && tile.kv_row >= 0 && int64_t{tile.kv_row} + tile.kv_len <= runs_.L;
    if (!in_range) tile.kv_len = -1;
    return tile;
  }

 private:
  // Lane l takes user first_user + l; rows without a user count as user U's.
  __device__ void load(int32_t first_user, int32_t before) {
    const int lane = threadIdx.x % 32;
    const int32_t user = first_user + lane;
    first_user_ = first_user;
    before_ = before;
    // All loads at once, whatever the lane's user.
    const int32_t first = runs_.user_offsets[min(user, runs_.U)];
    const int32_t next = runs_.user_offsets[min(user + 1, runs_.U)];
    kv_row_ = 0;
    kv_len_ = runs_.L;
    if (user < runs_.U) {
      if (runs_.kv_start != nullptr) kv_row_ = runs_.kv_start[user];
      if (runs_.kv_len != nullptr) {
        kv_len_ = runs_.kv_len[user];
      } else if (runs_.kv_start != nullptr) {
        kv_len_ = runs_.kv_start[user + 1] - kv_row_;
      }
    }
    first_candidate_ = first;
    candidates_ = (user < runs_.U ? next : runs_.B) - first;
    if (user > runs_.U) candidates_ = 0;
    if (longest_first_) sort(user);
    const int64_t rows = int64_t{candidates_} * runs_.S.divisor();
    tiles_ = static_cast<int32_t>((rows + kTileM - 1) / kTileM);
    inclusive_ = tiles_ * runs_.H;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, inclusive_, step);
      if (lane >= step) inclusive_ += other;
    }
  }

  // Gives the lanes their users by descending length of history.
  __device__ void sort(int32_t user) {
    const int lane = threadIdx.x % 32;
    const int32_t length = user < runs_.U ? kv_len_ : -1;
    int rank = 0, from = 0;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) {
      const int32_t other = __shfl_sync(0xffffffffu, length, i);
      rank += other > length || (other == length && i < lane);
    }
#pragma unroll 8
    for (int i = 0; i < 32; ++i) {
      if (__shfl_sync(0xffffffffu, rank, i) == lane) from = i;
    }
    user_ = __shfl_sync(0xffffffffu, user, from);
    first_candidate_ = __shfl_sync(0xffffffffu, first_candidate_, from);
    candidates_ = __shfl_sync(0xffffffffu, candidates_, from);
    kv_row_ = __shfl_sync(0xffffffffu, kv_row_, from);
    kv_len_ = __shfl_sync(0xffffffffu, kv_len_, from);
  }

  const UserRuns& runs_;
  const bool longest_first_;
  int32_t user_ = 0;                              // where sorted, the lane's
  int32_t first_user_ = 0;                        // of the 32 users at hand, a lane each
  int32_t before_ = 0;                            // tiles of the users before them, of all heads
  int32_t first_candidate_ = 0, candidates_ = 0;  // of the lane's user
  int32_t kv_row_ = 0, kv_len_ = 0;
  int32_t tiles_ = 0;      // of one of its heads
  int32_t inclusive_ = 0;  // of all heads of the users up to it
};

// Hands tiles from the warp that finds them to those that work on them.
template <int kSlots, int kReaders, class Tile>
struct TileRing {
  class Position {
   public:
    __device__ void advance() { ++count_; }
    __device__ int slot() const { return count_ % kSlots; }
    __device__ uint32_t phase() const { return static_cast<uint32_t>(count_) / kSlots % 2; }

   private:
    int32_t count_ = 0;
  };
  static_assert((kSlots & (kSlots - 1)) == 0);
  hopper::Barrier full[kSlots];
  hopper::Barrier empty[kSlots];
  Tile tiles[kSlots];

  // By a whole warp, as Pipeline's.
  __device__ void init_by_warp() {
    const int lane = threadIdx.x % 32;
    if (lane < kSlots) {
      hopper::init(full[lane], 1);
    } else if (lane < 2 * kSlots) {
      hopper::init(empty[lane - kSlots], kReaders);
    }
  }
  // By one thread.
  __device__ void write(const Position& position, const Tile& tile) {
    hopper::wait(empty[position.slot()], position.phase() ^ 1);
    tiles[position.slot()] = tile;
    hopper::arrive(full[position.slot()]);
  }
  // By the thread that wrote it: until all have read it.
  __device__ void wait_read(const Position& position) {
    hopper::wait(empty[position.slot()], position.phase());
  }
  // By each reader, which is a thread.
  __device__ Tile read_alone(const Position& position) {
    hopper::wait(full[position.slot()], position.phase());
    const Tile tile = tiles[position.slot()];
    hopper::arrive(empty[position.slot()]);
    return tile;
  }
  // By each reader, which is a warp.
  __device__ Tile read(const Position& position) {
    hopper::wait(full[position.slot()], position.phase());
    const Tile tile = tiles[position.slot()];
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::arrive(empty[position.slot()]);
    return tile;
  }
};

}  // namespace ikbo::attention
