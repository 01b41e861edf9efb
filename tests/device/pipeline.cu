// The ring between a producer and consumers: both groups read every block, or they take turns by
// tile; alone or in clusters with multicast.
#include "entry.h"
#include "hopper/cluster.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/tma.cuh"
#include "hopper/warp_group.cuh"
#include "launch/tensor_map.h"

namespace ikbo {
namespace {

constexpr int kWidth = 128;  // fp32 elements a row: one a thread of a warp group
constexpr int kRows = 2;     // rows a block
constexpr int kSlots = 3;

enum class Named { kGroup0 = 1, kGroup1, kTurn0, kTurn1 };

template <class Ring>
struct Shared {
  alignas(1024) float blocks[kSlots][kRows][kWidth];
  Ring ring;
};

// The caller's share of a tile: sum over its blocks k of (k + 1) * (row 0 + 2 * row 1).
template <class Ring>
__device__ float consume_tile(Shared<Ring>& shared, typename Ring::Position& position, int blocks,
                              int group) {
  const int column = threadIdx.x % hopper::kWarpGroupThreads;
  float sum = 0;
  for (int k = 0; k < blocks; ++k) {
    shared.ring.wait_full(position);
    const auto& block = shared.blocks[position.slot];
    sum += (k + 1) * (block[0][column] + 2 * block[1][column]);
    hopper::barrier_wait(group == 0 ? Named::kGroup0 : Named::kGroup1, hopper::kWarpGroupThreads);
    shared.ring.release(position.slot);
    position.advance();
  }
  return sum;
}

// Group 0 produces; groups 1 and 2 consume. out[cta][tile][column] and, where both groups read each
// block, a second such array for the second group. Each CTA goes through all tiles. Two CTAs of a
// cluster load a row of each block each, for both.
template <bool kTurns, int kClusterCtas>
__global__ void __launch_bounds__(3 * hopper::kWarpGroupThreads, 1)
    pipeline_test_kernel(const __grid_constant__ CUtensorMap map, int tiles, int blocks,
                         float* out) {
  using Ring = hopper::Pipeline<kSlots, kTurns ? 1 : 2, kClusterCtas>;
  static_assert(Ring::kEmptyArrivals == (kTurns ? 1 : 2) * kClusterCtas);
  extern __shared__ __align__(1024) char bytes[];
  Shared<Ring>& shared = *reinterpret_cast<Shared<Ring>*>(bytes);
  if (hopper::warp_index() == 0) {
    shared.ring.init_by_warp();
    hopper::fence_barrier_init();
  }
  hopper::cluster_sync();

  typename Ring::Position position;
  if (hopper::warp_group_index() == 0) {
    if (hopper::warp_index() == 0 && hopper::elect_one()) {
      for (int block = 0; block < tiles * blocks; ++block) {
        hopper::Barrier& full = shared.ring.produce(position, sizeof(shared.blocks[0]));
        auto& slot = shared.blocks[position.slot];
        constexpr auto kHint = hopper::L2Hint::kNormal;
        if constexpr (kClusterCtas == 1) {
          hopper::tma_load(slot[0], map, full, kHint, 0, kRows * block);
          hopper::tma_load(slot[1], map, full, kHint, 0, kRows * block + 1);
        } else {
          const int row = hopper::cluster_cta_rank();
          hopper::tma_load_multicast(slot[row], map, full, kHint, 3, 0, kRows * block + row);
        }
        position.advance();
      }
    }
  } else {
    const int group = hopper::warp_group_index() - 1;
    const int column = threadIdx.x % hopper::kWarpGroupThreads;
    const Named mine = group == 0 ? Named::kTurn0 : Named::kTurn1;
    const Named partners = group == 0 ? Named::kTurn1 : Named::kTurn0;
    float* sums = out + int64_t{blockIdx.x} * tiles * kWidth;
    if constexpr (kTurns) {
      constexpr int kBoth = 2 * hopper::kWarpGroupThreads;
      if (group == 1) {
        if (tiles > 0) hopper::barrier_arrive(partners, kBoth);
        position.advance(blocks);
      }
      for (int tile = group; tile < tiles; tile += 2) {
        hopper::barrier_wait(mine, kBoth);
        const float sum = consume_tile(shared, position, blocks, group);
        if (tile + 1 < tiles) hopper::barrier_arrive(partners, kBoth);
        position.advance(blocks);
        sums[tile * kWidth + column] = sum;
      }
    } else {
      sums += int64_t{group} * gridDim.x * tiles * kWidth;
      for (int tile = 0; tile < tiles; ++tile) {
        sums[tile * kWidth + column] = consume_tile(shared, position, blocks, group);
      }
    }
  }
  hopper::cluster_sync();
}

template <bool kTurns, int kClusterCtas>
void run(const CUtensorMap& map, int tiles, int blocks, int clusters, float* out,
         cudaStream_t stream) {
  using Ring = hopper::Pipeline<kSlots, kTurns ? 1 : 2, kClusterCtas>;
  const LaunchShape shape{static_cast<unsigned>(clusters * kClusterCtas),
                          3 * hopper::kWarpGroupThreads, sizeof(Shared<Ring>), kClusterCtas};
  launch(pipeline_test_kernel<kTurns, kClusterCtas>, shape, stream, map, tiles, blocks, out);
}

}  // namespace
}  // namespace ikbo

// in[tiles * blocks * 2][128] fp32. cluster: 1 or 2.
IKBO_TEST_ENTRY ikbo_test_pipeline(bool turns, int cluster, int clusters, int tiles, int blocks,
                                   const float* in, float* out, cudaStream_t stream) {
  using namespace ikbo;
  return entry([&] {
    const CUtensorMap map =
        make_tensor_map(in, ElementType::kFloat32, {kWidth, kRows * tiles * blocks}, {kWidth * 4},
                        {kWidth, 1}, Swizzle::kNone);
    const auto run_form = turns ? (cluster == 1 ? run<true, 1> : run<true, 2>)
                                : (cluster == 1 ? run<false, 1> : run<false, 2>);
    run_form(map, tiles, blocks, clusters, out, stream);
  });
}
