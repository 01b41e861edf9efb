// The epilogue of a gated MLP's backward. The sums are the gradient of the hidden tensor,
// H = act(gate) * up, of which only this is left, from the pre-activations that training saved:
//   grad_gate = H' * up * act'(gate)    grad_up = H' * act(gate)    H again, for the next weight
//
// Each consumer has a helper warp of the producer's group, which moves the pieces (64 x 64) of its
// tiles between global and shared memory, in two sets of three staging buffers by turns:
//   helper    waits until the set's last store has read it; loads gate and up; they complete `full`
//   consumer  waits for `full`; puts the gradients in gate's and up's places, H beside them;
//             arrives on kStaged
//   helper    waits for kStaged; stores
// A tile's first two pieces are there before its products are.
#pragma once

#include "kernels/activation.cuh"
#include "kernels/gemm/gemm_sm90.cuh"

namespace ikbo::gemm {

// All maps as the map of d, which is grad_gate's.
struct GatedGradMaps {
  CUtensorMap gate, up;
  CUtensorMap grad_up;
  CUtensorMap hidden;  // only with has_hidden
  Activation activation;
  bool has_hidden;
};

struct GatedGradEpilogue : BaseEpilogue {
  using Params = GatedGradMaps;
  static constexpr bool kHasHelpers = true;
  static constexpr int kSets = 2, kBuffers = 3 * kSets;
  static constexpr hopper::Major kMajorB = hopper::Major::kMn;

  struct Shared {
    hopper::Barrier full[kConsumers][kSets];

    __device__ void init() {
      for (auto& of_consumer : full) {
        for (hopper::Barrier& barrier : of_consumer) hopper::init(barrier, 1);
      }
    }
  };

  __device__ static NamedBarrier staged(int consumer, int set) {
    return hopper::numbered(NamedBarrier::kStaged, kSets * consumer + set);
  }

  // The helper warp of a consumer.
  template <class S>
  __device__ static void help(gemm::Shared<S, GatedGradEpilogue>& shared,
                              const gemm::Params& params, const GatedGradMaps& grad, int consumer);

  template <class S>
  struct Consumer;
};

// ---- helper ------------------------------------------------------------------------------------
// Where a piece lies in the matrices; nowhere past a consumer's last.
struct Piece {
  int row = -1, column = 0;
  __device__ bool is_there() const { return row >= 0; }
};

// The pieces of a consumer's tiles, in its order.
template <class S>
struct PieceWalk {
  static constexpr int kColumns = S::kTileN / kStoreTile;
  static constexpr int kPieces = S::kBlocksM * kColumns;  // of a tile

  const TileOrder& order;
  TileSchedule tiles;
  int first_row, first_column;  // of the tile
  int piece = kPieces;

  __device__ PieceWalk(const TileOrder& tile_order, int consumer)
      : order(tile_order), tiles(tiles_of_consumer<S>(tile_order, consumer)) {}

  __device__ Piece next() {
    static_assert(S::kPingPong, "a consumer has tiles of its own");
    if (piece == kPieces) {
      if (!tiles.has_tile()) return {};
      const TileCoordinates tile = order.at(tiles.tile());
      first_row = tile.m_tile * S::kTileM, first_column = tile.n_tile * S::kTileN;
      tiles.next();
      piece = 0;
    }
    const Piece at{first_row + piece / kColumns * kStoreTile,
                   first_column + piece % kColumns * kStoreTile};
    ++piece;
    return at;
  }
};

template <class S>
__device__ void GatedGradEpilogue::help(gemm::Shared<S, GatedGradEpilogue>& shared,
                                        const gemm::Params& params, const GatedGradMaps& grad,
                                        int consumer) {
  constexpr uint32_t kBufferBytes = kStoreTile * kStoreTile * sizeof(typename S::T);
  const bool leads = threadIdx.x % 32 == 0;
  PieceWalk<S> walk(params.order, consumer);
  const auto load_next = [&](int set) {
    const Piece at = walk.next();
    if (leads && at.is_there()) {
      auto* buffers = shared.staging[consumer] + 3 * set;
      hopper::Barrier& full = shared.epilogue.full[consumer][set];
      hopper::tma_store_wait_read<0>();
      hopper::arrive_expect_bytes(full, 2 * kBufferBytes);
      hopper::tma_load(buffers[0], grad.gate, full, hopper::L2Hint::kEvictFirst, at.column, at.row);
      hopper::tma_load(buffers[1], grad.up, full, hopper::L2Hint::kEvictFirst, at.column, at.row);
    }
    return at;
  };
  Piece at = load_next(0), then = load_next(1);
  for (int set = 0; at.is_there(); set ^= 1) {
    __syncwarp();
    hopper::barrier_wait(staged(consumer, set), hopper::kWarpGroupThreads + 32);
    if (leads) {
      auto* buffers = shared.staging[consumer] + 3 * set;
      const auto store = [&](const CUtensorMap& map, int buffer) {
        hopper::tma_store(map, buffers[buffer], hopper::L2Hint::kNormal, at.column, at.row);
      };
      store(params.d, 0);
      store(grad.grad_up, 1);
      if (grad.has_hidden) store(grad.hidden, 2);
      hopper::tma_store_commit();
    }
    at = then, then = load_next(set);
  }
  if (leads) hopper::tma_store_wait_read<0>();
}

// ---- consumer ----------------------------------------------------------------------------------
template <class S>
struct GatedGradEpilogue::Consumer {
  using T = typename S::T;

  gemm::Shared<S, GatedGradEpilogue>& shared;
  const gemm::Params& params;
  const GatedGradMaps& grad;
  const int consumer;
  uint32_t step = 0;

  __device__ void begin(int32_t) {}

  __device__ void finish(Sums<S>& sums, int32_t) {
#pragma unroll
    for (int block = 0; block < S::kBlocksM; ++block) {
#pragma unroll
      for (int column = 0; column < S::kTileN; column += kStoreTile) {
        // 16 column pairs of the upper and the lower of two rows, in turn.
        finish_piece(reinterpret_cast<float (&)[32]>(sums[block][column / 2]));
      }
    }
  }

  __device__ void end() {}

 private:
  __device__ void finish_piece(const float (&piece)[32]) {
    const int set = step % kSets;
    auto* buffers = shared.staging[consumer] + 3 * set;
    hopper::wait(shared.epilogue.full[consumer][set], step / kSets % 2);
#pragma unroll
    for (int i = 0; i < kStoreTile / 16; ++i) {
      // Chosen anew for every 16 columns: where more of them are one stretch of code, ptxas spills.
      with_activation(grad.activation, [&](auto activation) {
        uint32_t gate[4], up[4], hidden[4];
        hopper::load_tiles(gate, staged_tiles(buffers[0], 16 * i));
        hopper::load_tiles(up, staged_tiles(buffers[1], 16 * i));
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const float2 g = unpack<T>(gate[pair]), u = unpack<T>(up[pair]);
          const float first = piece[8 * i + 2 * pair], second = piece[8 * i + 2 * pair + 1];
          const auto at_first = backward<decltype(activation)::value>(g.x, first * u.x);
          const auto at_second = backward<decltype(activation)::value>(g.y, second * u.y);
          gate[pair] = pack<T>(at_first.grad, at_second.grad);
          up[pair] = pack<T>(first * at_first.value, second * at_second.value);
          hidden[pair] = pack<T>(at_first.value * u.x, at_second.value * u.y);
        }
        hopper::store_tiles(staged_tiles(buffers[0], 16 * i), gate);
        hopper::store_tiles(staged_tiles(buffers[1], 16 * i), up);
        if (grad.has_hidden) hopper::store_tiles(staged_tiles(buffers[2], 16 * i), hidden);
      });
    }
    hopper::fence_shared_for_async();
    hopper::barrier_arrive(staged(consumer, set), hopper::kWarpGroupThreads + 32);
    ++step;
  }
};

}  // namespace ikbo::gemm
