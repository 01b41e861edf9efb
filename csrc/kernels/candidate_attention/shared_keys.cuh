// Tiles that don't fill a round (all after the last but one full round) shared out by blocks of
// keys, so that all CTAs end together. Each CTA gets a run of blocks (config/shared_blocks.h): at
// most the end of one tile, one whole tile and the beginning of another. The end of a tile is what
// it does first: it keeps its results in global memory, L2 in effect, in fp32. The beginning of a
// tile is what it does last: there it adds up what others have kept, most of it long ago.
//
// Runs are dealt out from the last CTA down, so that a CTA waits only for CTAs with smaller
// indices, which the GPU starts first: two such kernels on two streams can't keep each other's
// CTAs from starting.
#pragma once

#include "hopper/memory_order.cuh"
#include "kernels/candidate_attention/kept_results.cuh"

namespace ikbo::attention {

struct SharedTile : QueryTile {
  int32_t keeps;  // it isn't the tile's beginning
  int32_t adds;   // so many of the runs after this one have kept their parts of the tile
};

// A warp's flag is 1 once its results are there.
template <class S>
struct KeptFlags {
  static constexpr int kOfCta = S::kConsumers * kGroupThreads / 32;
  __device__ static uint32_t* of(const Params& params, int cta, int consumer) {
    return params.kept_flags + cta * kOfCta +
           (consumer * kGroupThreads + threadIdx.x % kGroupThreads) / 32;
  }
};

// All tiles of the users up to some, counted by a whole warp.
template <int kTileM>
class TileCounter {
 public:
  __device__ explicit TileCounter(const UserRuns& runs) : runs_(runs) {}

  // Whether there is a tile `index`; if not, tiles() are all.
  __device__ bool has(int32_t index) {
    for (; tiles_ <= index && first_user_ <= runs_.U; first_user_ += 32) {
      const int32_t user = first_user_ + threadIdx.x % 32;
      const int32_t first = runs_.user_offsets[min(user, runs_.U)];
      const int32_t next = user < runs_.U ? runs_.user_offsets[user + 1] : runs_.B;
      const int32_t rows = user > runs_.U ? 0 : (next - first) * runs_.S.divisor();
      tiles_ += runs_.H * __reduce_add_sync(0xffffffffu, (rows + kTileM - 1) / kTileM);
    }
    return tiles_ > index;
  }
  __device__ int32_t tiles() const { return tiles_; }

 private:
  const UserRuns& runs_;
  int32_t first_user_ = 0, tiles_ = 0;
};

// A whole warp, in place of find_tiles().
template <class S>
__device__ void find_shared_tiles(Shared<S>& shared, const Params& params) {
  TileFinder<S::kTileM> finder(params.runs);
  TileCounter<S::kTileM> counter(params.runs);
  typename S::Tiles::Position position;
  const auto write = [&](const SharedTile& tile) {
    if (threadIdx.x % 32 == 0) shared.tiles.write(position, tile);
    position.advance();
  };
  const int32_t ctas = gridDim.x;
  int32_t first = 0;
  for (; counter.has(first + 2 * ctas - 1); first += ctas) {
    write({finder.find(first + static_cast<int32_t>(blockIdx.x)), 0, 0});
  }
  const SharedBlocks& blocks = params.shared_blocks;
  const int32_t tiles = counter.tiles() - first;
  const int32_t run = ctas - 1 - blockIdx.x;
  const int32_t end = blocks.begin(tiles, run + 1);
  for (int32_t begin = blocks.begin(tiles, run); begin < end;) {
    const BlocksOfTile part = blocks.take(begin, end);
    begin += part.end - part.first;
    SharedTile tile{finder.find(first + part.tile), part.keeps(), 0};
    if (tile.kv_len > 0) {
      tile.kv_row += part.first * S::kTileN;
      tile.kv_len = min(tile.kv_len, part.end * S::kTileN) - part.first * S::kTileN;
      if (!tile.keeps) tile.adds = blocks.sharers(tiles, run, part.tile);
    } else if (tile.keeps) {
      continue;  // rows without a user
    }
    write(tile);
  }
  SharedTile last{};
  last.head = -1;
  write(last);
}

// Each warp of a consumer, its rows; outputs are divided by the sum of exponentials.
template <class S>
__device__ inline void hand_over_results(const Params& params, const Outputs<S>& outputs,
                                         const float (&lse)[2], int consumer) {
  keep_results<S>(kept_results<S>(params, blockIdx.x), outputs, lse, consumer);
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    hopper::add_release_gpu(KeptFlags<S>::of(params, blockIdx.x, consumer), 1);
  }
}

// Likewise: adds the parts that `adds` other CTAs have kept, in the order of keys. A part weighs
// exp(its lse - lse of all).
template <class S>
__device__ inline void add_kept_results(const Params& params, Outputs<S>& outputs, float (&lse)[2],
                                        int consumer, int32_t adds) {
  const int thread = threadIdx.x % kGroupThreads;
#pragma unroll 1
  for (int32_t i = 1; i <= adds; ++i) {
    const int cta = static_cast<int>(blockIdx.x) - i;
    if (thread % 32 == 0) hopper::wait_flag_gpu(KeptFlags<S>::of(params, cta, consumer), 1);
    __syncwarp();
    const KeptResults<S>& kept = kept_results<S>(params, cta);
    const float2 other = __ldcg(&kept.lse[consumer][thread]);
    float4 parts[S::kHeadV / 8];
#pragma unroll
    for (int j = 0; j < S::kHeadV / 8; ++j) parts[j] = __ldcg(&kept.outputs[consumer][j][thread]);
    float mine[2], its[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float there = row == 0 ? other.x : other.y;
      const float maximum = fmaxf(lse[row], there);
      const float a = __expf(lse[row] - maximum), b = __expf(there - maximum);
      mine[row] = __fdividef(a, a + b);
      its[row] = __fdividef(b, a + b);
      lse[row] = maximum + __logf(a + b);
    }
#pragma unroll
    for (int j = 0; j < S::kHeadV / 2; ++j) {
      outputs[j] = outputs[j] * mine[j % 4 / 2] + (&parts[j / 4].x)[j % 4] * its[j % 4 / 2];
    }
  }
}

}  // namespace ikbo::attention
