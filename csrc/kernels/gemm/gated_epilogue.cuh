// D = act(A Wg^T + bg) * (A Wu^T + bu): the epilogue of two products with the same rows.
//
// A B tile is kTileN / 2 rows of Wg and as many of Wu, so a thread holds gate and up of the same
// elements. They are joined in fp32, and a tile leaves half as many columns as it has sums.
#pragma once

#include "hopper/async_copy.cuh"
#include "kernels/activation.cuh"
#include "kernels/gemm/gemm_sm90.cuh"

namespace ikbo::gemm {

struct GatedParams {
  CUtensorMap b_up;         // as the map of b, which is the gate's
  CUtensorMap gate_preact;  // as the map of d; only with has_preacts
  CUtensorMap up_preact;    // likewise
  const void* gate_bias;    // [columns] in T, 16-byte aligned; or null
  const void* up_bias;      // likewise
  int32_t columns;          // of D; a multiple of 8
  Activation activation;
  bool has_preacts;  // A Wg^T + bg and A Wu^T + bu are stored too
};

struct GatedEpilogue : BaseEpilogue {
  using Params = GatedParams;
  static constexpr int kWeights = 2;
  static constexpr int kMaxColumns = 128;

  struct Shared {
    // The biases of a consumer's tile, in pairs: the gate's, then the up's.
    alignas(16) uint32_t bias[kConsumers][2][kMaxColumns / 2];

    __device__ void init() {}
  };

  template <class S>
  struct Consumer;
};

template <class S>
struct GatedEpilogue::Consumer {
  using T = typename S::T;
  using Bias = uint32_t[kMaxColumns / 2];
  static constexpr int kColumns = S::kTileN / 2;  // of D in a tile
  static_assert(kColumns % kStoreTile == 0 && kColumns <= kMaxColumns);

  gemm::Shared<S, GatedEpilogue>& shared;
  const gemm::Params& params;
  const GatedParams& gated;
  const int consumer;
  int buffer = 0;

  // The biases arrive while the products run.
  __device__ void begin(int32_t index) {
    constexpr int kChunks = kColumns / 8;  // of 16 bytes
    const int thread = threadIdx.x % hopper::kWarpGroupThreads;
    if (thread >= 2 * kChunks) return;
    const int chunk = thread % kChunks;
    const int column = params.order.at(index).n_tile * kColumns + 8 * chunk;
    const bool is_up = thread >= kChunks;
    const auto* bias = static_cast<const T*>(is_up ? gated.up_bias : gated.gate_bias);
    if (bias == nullptr || column >= gated.columns) return;
    hopper::copy_async_16(shared.epilogue.bias[consumer][is_up] + 4 * chunk, bias + column);
  }

  __device__ void finish(Sums<S>& sums, int32_t index) {
    const TileCoordinates tile = params.order.at(index);
    const int m = tile.m_tile * S::kTileM + first_row<S>(consumer);
    const int n = tile.n_tile * kColumns;
    hopper::wait_for_copies();  // this thread's; take_buffer() waits for the others
#pragma unroll
    for (int block = 0; block < S::kBlocksM; ++block) {
#pragma unroll
      for (int column = 0; column < kColumns; column += kStoreTile) {
        // 16 column pairs of the upper and the lower of two rows, in turn.
        float (&gate)[32] = reinterpret_cast<float (&)[32]>(sums[block][column / 2]);
        float (&up)[32] = reinterpret_cast<float (&)[32]>(sums[block][(kColumns + column) / 2]);
        finish_piece(gate, up, column, m + 64 * block, n + column);
      }
    }
  }

  __device__ void end() {
    if (stores()) hopper::tma_store_wait_read<0>();
  }

 private:
  __device__ static bool stores() { return threadIdx.x % hopper::kWarpGroupThreads == 0; }

  __device__ void finish_piece(float (&gate)[32], float (&up)[32], int tile_column, int row,
                               int column) {
    take_buffer();
    const auto& bias = shared.epilogue.bias[consumer];
    if (gated.gate_bias != nullptr) add_bias(gate, bias[0], tile_column);
    if (gated.up_bias != nullptr) add_bias(up, bias[1], tile_column);
    if (gated.has_preacts) {
      store(gated.gate_preact, gate, row, column, hopper::L2Hint::kEvictFirst);
      take_buffer();
      store(gated.up_preact, up, row, column, hopper::L2Hint::kEvictFirst);
      take_buffer();
    }
    with_activation(gated.activation, [&](auto activation) {
#pragma unroll
      for (int i = 0; i < 32; ++i) gate[i] = apply<decltype(activation)::value>(gate[i]) * up[i];
    });
    store(params.d, gate, row, column, hopper::L2Hint::kNormal);  // the next layer reads it
  }

  // Waits until the buffer's last store has read it: all but the latest have.
  __device__ void take_buffer() const {
    if (stores()) hopper::tma_store_wait_read<1>();
    hopper::barrier_wait(hopper::numbered(NamedBarrier::kStaging, consumer),
                         hopper::kWarpGroupThreads);
  }

  __device__ void store(const CUtensorMap& map, const float (&piece)[32], int row, int column,
                        hopper::L2Hint hint) {
    auto* staging = shared.staging[consumer][buffer];
    stage_block<T>(staging, piece, 0);
    hopper::fence_shared_for_async();
    hopper::barrier_wait(hopper::numbered(NamedBarrier::kStaging, consumer),
                         hopper::kWarpGroupThreads);
    if (stores()) {
      hopper::tma_store(map, staging, hint, column, row);
      hopper::tma_store_commit();
    }
    buffer ^= 1;
  }

  __device__ static void add_bias(float (&piece)[32], const Bias& bias, int tile_column) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = unpack<T>(bias[tile_column / 2 + 4 * i + threadIdx.x % 4]);
      piece[4 * i] += pair.x, piece[4 * i + 1] += pair.y;
      piece[4 * i + 2] += pair.x, piece[4 * i + 3] += pair.y;
    }
  }
};

}  // namespace ikbo::gemm
