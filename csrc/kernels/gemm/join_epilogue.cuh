// D = act(A B^T + part[user of the row] + bias): the epilogue of products with a shared user side.
//
// Two idle warps of the producer group help, one each consumer: warp 2 + c gathers the part's rows
// for the 64 x 64 pieces of consumer c's tiles straight into its staging buffers, two pieces ahead,
// and stores the pieces once they are done. The consumer adds its sums to the piece in place. Kept
// apart like this, neither the gather's latency nor the stores' holds up the products, and only the
// helpers wait for the kernel that computes the part. The way of a buffer:
//   helper    waits until the buffer's last store has read it; gathers; arrives on `full`
//   consumer  waits for `full`; sums, bias, activation; arrives on kStaged
//   helper    waits for kStaged; stores
// With a pre-activation output each piece goes through two buffers in a row: first the
// pre-activation, joined in place, then the output, with nothing to gather.
#pragma once

#include <limits>

#include "hopper/async_copy.cuh"
#include "kernels/activation.cuh"
#include "kernels/gemm/gemm_sm90.cuh"

namespace ikbo::gemm {

struct JoinParams {
  CUtensorMap preact;           // as the map of d; only with has_preact
  const int32_t* cand_to_user;  // [rows], or null: every row is user 0's
  const void* part;             // [n_users, columns] in T or fp32, or null: nothing joins
  int64_t part_stride;          // elements; rows are 16-byte aligned (fp32 rows: 8-byte) and, in
                                // 16 bits, less than 64 GiB in all
  const void* bias;             // [columns] in T, 16-byte aligned; or null
  int32_t rows;
  int32_t columns;  // a multiple of 8
  int32_t n_users;
  Activation activation;
  bool part_is_float;
  bool has_preact;  // the pre-activation is stored too; zero in rows without a user
};

struct JoinEpilogue : BaseEpilogue {
  using Params = JoinParams;
  static constexpr bool kHasHelpers = true;
  static constexpr int32_t kPaddingRow = -1;

  struct Shared {
    hopper::Barrier full[kConsumers][2];
    alignas(16) uint32_t bias[kConsumers][2][kStoreTile / 2];  // of the piece, in pairs

    __device__ void init() {
      for (auto& of_consumer : full) {
        for (hopper::Barrier& barrier : of_consumer) hopper::init(barrier, 32);
      }
    }
  };

  // What cand_to_user says of a row; rows past the end are padding.
  __device__ static int32_t user_of_row(const Params& join, int32_t row) {
    if (row >= join.rows) return kPaddingRow;
    return join.cand_to_user == nullptr ? 0 : join.cand_to_user[row];
  }
  __device__ static bool is_user(const Params& join, int32_t user) {
    return static_cast<uint32_t>(user) < static_cast<uint32_t>(join.n_users);
  }

  __device__ static NamedBarrier staged(int consumer, int buffer) {
    return hopper::numbered(NamedBarrier::kStaged, 2 * consumer + buffer);
  }

  // The helper warp of a consumer.
  template <class S>
  __device__ static void help(gemm::Shared<S, JoinEpilogue>& shared, const gemm::Params& params,
                              const Params& join, int consumer);

  template <class S>
  struct Consumer;
};

// ---- helper ------------------------------------------------------------------------------------
inline constexpr uint32_t kNoRow = 0xffffffff;

// Where the row of this user begins in a 16-bit part, in chunks of 16 bytes; kNoRow without a user.
__device__ inline uint32_t part_row(const JoinParams& join, int32_t user) {
  const auto stride = static_cast<uint32_t>(join.part_stride / 8);
  return JoinEpilogue::is_user(join, user) ? user * stride : kNoRow;
}

// Copies the part's rows of a piece into a staging buffer: eight lanes a row of 128 bytes. Rows
// without a user and columns past the end are left as they are. Lane l passes the part_row of rows
// l and 32 + l.
__device__ inline void gather_piece(void* staging, const JoinParams& join,
                                    const uint32_t (&part_rows)[2], int first_column) {
  const int lane = threadIdx.x % 32;
  const int chunk = lane % 8;
  const int column = first_column + 8 * chunk;
  const auto* part = static_cast<const uint4*>(join.part);
  const bool in_range = column < join.columns;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll 4
    for (int first = 0; first < 32; first += 4) {
      const int row = first + lane / 8;
      const uint32_t part_row = __shfl_sync(0xffffffffu, part_rows[half], row);
      if (in_range && part_row != kNoRow) {
        hopper::copy_async_16(
            static_cast<char*>(staging) + hopper::swizzle_128(32 * half + row, 16 * chunk),
            part + (part_row + column / 8));
      }
    }
  }
}

template <class S>
__device__ void JoinEpilogue::help(gemm::Shared<S, JoinEpilogue>& shared,
                                   const gemm::Params& params, const Params& join, int consumer) {
  using T = typename S::T;
  constexpr int kColumns = S::kTileN / kStoreTile;  // pieces side by side
  constexpr int kPieces = S::kBlocksM * kColumns;
  static_assert(kPieces % 2 == 0, "a tile's first step is in buffer 0");
  const int lane = threadIdx.x % 32;
  const bool gathers = join.part != nullptr && !join.part_is_float;
  // Of two steps a piece the first is the pre-activation's, so that buffer 0 always holds one.
  const int steps_log2 = join.has_preact ? 1 : 0;
  uint32_t part_rows[2];
  int previous_row = -1, previous_column = 0;
  const auto store_previous = [&](int buffer) {
    __syncwarp();
    hopper::barrier_wait(staged(consumer, buffer), hopper::kWarpGroupThreads + 32);
    if (lane == 0) {
      hopper::tma_store(join.has_preact && buffer == 0 ? join.preact : params.d,
                        shared.staging[consumer][buffer], hopper::L2Hint::kEvictFirst,
                        previous_column, previous_row);
      hopper::tma_store_commit();
    }
  };
  for (auto tiles = tiles_of_consumer<S>(params.order, consumer); tiles.has_tile(); tiles.next()) {
    const TileCoordinates tile = params.order.at(tiles.tile());
#pragma unroll 1
    for (int step = 0; step < kPieces << steps_log2; ++step) {
      const int piece = step >> steps_log2, buffer = step % 2;
      const bool begins_piece = piece << steps_log2 == step;
      const int row = tile.m_tile * S::kTileM + first_row<S>(consumer) + piece / kColumns * 64;
      const int column = tile.n_tile * S::kTileN + piece % kColumns * 64;
      if (begins_piece && piece % kColumns == 0) {
        part_rows[0] = part_row(join, user_of_row(join, row + lane));
        part_rows[1] = part_row(join, user_of_row(join, row + 32 + lane));
      }
      if (previous_row < 0) hopper::wait_for_previous_kernel();
      if (lane == 0) hopper::tma_store_wait_read<0>();
      __syncwarp();
      if (begins_piece) {
        if (gathers) gather_piece(shared.staging[consumer][buffer], join, part_rows, column);
        if (join.bias != nullptr && lane < 8 && column + 8 * lane < join.columns) {
          hopper::copy_async_16(shared.epilogue.bias[consumer][buffer] + 4 * lane,
                                static_cast<const T*>(join.bias) + column + 8 * lane);
        }
      }
      hopper::arrive_after_copies(shared.epilogue.full[consumer][buffer]);
      if (previous_row >= 0) store_previous(buffer ^ 1);
      previous_row = row, previous_column = column;
    }
  }
  if (previous_row >= 0) store_previous(1);
  if (lane == 0) hopper::tma_store_wait_read<0>();
}

// ---- consumer ----------------------------------------------------------------------------------
template <class S>
struct JoinEpilogue::Consumer {
  using T = typename S::T;

  gemm::Shared<S, JoinEpilogue>& shared;
  const gemm::Params& params;
  const JoinParams& join;
  const int consumer;
  int first_column = 0;
  int32_t users[S::kBlocksM][2] = {};  // of the thread's rows
  uint32_t step = 0;

  // The users arrive while the products run.
  __device__ void begin(int32_t index) {
    const TileCoordinates tile = params.order.at(index);
    first_column = tile.n_tile * S::kTileN;
    const int thread = threadIdx.x % hopper::kWarpGroupThreads;
    const int row =
        tile.m_tile * S::kTileM + first_row<S>(consumer) + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int block = 0; block < S::kBlocksM; ++block) {
      users[block][0] = user_of_row(join, row + 64 * block);
      users[block][1] = user_of_row(join, row + 64 * block + 8);
    }
  }

  __device__ void finish(Sums<S>& sums, int32_t) {
    if (join.part_is_float) add_float_part(sums);
#pragma unroll
    for (int block = 0; block < S::kBlocksM; ++block) {
#pragma unroll
      for (int column = 0; column < S::kTileN; column += kStoreTile) {
        // The piece: 16 column pairs of the upper and the lower of two rows, in turn.
        float (&piece)[32] = reinterpret_cast<float (&)[32]>(sums[block][column / 2]);
        finish_piece(piece, users[block]);
      }
    }
  }

  __device__ void end() {}

 private:
  __device__ void finish_piece(float (&piece)[32], const int32_t (&of_rows)[2]) {
    const bool has_user[2] = {is_user(join, of_rows[0]), is_user(join, of_rows[1])};
    T* staging = wait_full();
    if (join.part != nullptr && !join.part_is_float) add_staged_part(piece, staging);
    if (join.bias != nullptr) add_bias(piece, shared.epilogue.bias[consumer][step % 2]);
    if (join.has_preact) {
      fill_rows_without_user(piece, has_user, {0, 0});
      stage_block(staging, piece, 0);
      hand_over();
      staging = wait_full();
    }
    with_activation(join.activation, [&](auto activation) {
#pragma unroll
      for (float& value : piece) value = apply<decltype(activation)::value>(value);
    });
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    fill_rows_without_user(
        piece, has_user,
        {of_rows[0] == kPaddingRow ? 0 : kNan, of_rows[1] == kPaddingRow ? 0 : kNan});
    stage_block(staging, piece, 0);
    hand_over();
  }

  __device__ T* wait_full() {
    const int buffer = step % 2;
    hopper::wait(shared.epilogue.full[consumer][buffer], step / 2 % 2);
    return shared.staging[consumer][buffer];
  }
  __device__ void hand_over() {
    hopper::fence_shared_for_async();
    hopper::barrier_arrive(staged(consumer, step % 2), hopper::kWarpGroupThreads + 32);
    ++step;
  }

  __device__ static void add_staged_part(float (&piece)[32], T* staging) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t tiles[4];
      hopper::load_tiles(tiles, staged_tiles(staging, 16 * i));
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float2 values = unpack<T>(tiles[pair]);
        piece[8 * i + 2 * pair] += values.x, piece[8 * i + 2 * pair + 1] += values.y;
      }
    }
  }

  __device__ static void add_bias(float (&piece)[32], const uint32_t (&bias)[kStoreTile / 2]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = unpack<T>(bias[4 * i + threadIdx.x % 4]);
      piece[4 * i] += pair.x, piece[4 * i + 1] += pair.y;
      piece[4 * i + 2] += pair.x, piece[4 * i + 3] += pair.y;
    }
  }

  // Each thread reads its own.
  __device__ void add_float_part(Sums<S>& sums) const {
    hopper::wait_for_previous_kernel();
    const int column = first_column + threadIdx.x % 4 * 2;
#pragma unroll
    for (int block = 0; block < S::kBlocksM; ++block) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int32_t user = users[block][row];
        if (!is_user(join, user)) continue;
        const float* part = static_cast<const float*>(join.part) + user * join.part_stride + column;
#pragma unroll
        for (int i = 0; i < S::kTileN / 8; ++i) {
          if (column + 8 * i >= join.columns) continue;
          const float2 values = *reinterpret_cast<const float2*>(part + 8 * i);
          sums[block][4 * i + 2 * row] += values.x, sums[block][4 * i + 2 * row + 1] += values.y;
        }
      }
    }
  }

  __device__ static void fill_rows_without_user(float (&piece)[32], const bool (&has_user)[2],
                                                const float (&fill)[2]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (!has_user[i / 2 % 2]) piece[i] = fill[i / 2 % 2];
    }
  }
};

}  // namespace ikbo::gemm
