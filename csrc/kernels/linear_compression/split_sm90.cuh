// Linear compression of few candidates, in one launch: the users' product is computed again for
// each candidate, in the same sums, and K is split over the CTAs of a cluster.
//
//   out[b] = act([W_cand W_user] @ [E_cand[b]; E_user[u(b)]] + bias[:, None])
//
// With few candidates nothing fills the GPU, and a CTA's time is the time its operands take to come
// in. So all SMs take a share: each CTA of a cluster multiplies its blocks of K, as
// linear_compression_sm90.cuh does (two consumers, 64 columns each, by kTileM rows of W). Then each
// sends its sums of 16 rows of W at a time to the CTA that they belong to, through distributed
// shared memory, where they are added in the order of the CTAs, finished and stored.
//
// Waits: the loading threads and consumers for one another at the rings; all of the cluster before
// the first sums are sent (they land where the rings were) and before the first are read.
#pragma once

#include <limits>

#include "hopper/cluster.cuh"
#include "hopper/mbarrier.cuh"
#include "hopper/tma.cuh"
#include "kernels/activation.cuh"
#include "kernels/linear_compression/tile.cuh"
#include "kernels/numeric.cuh"

namespace ikbo::linear_compression {

inline constexpr int kRowBlock = 16;  // rows of W that are sent and finished at a time

// A kernel of the table whose K is split over a cluster.
template <class T, int kKernel>
struct SplitShape : Shape<T, kKernel> {
  using Base = Shape<T, kKernel>;
  static constexpr int kCtas = kLinearCompressionSplitCtas[kKernel];
  static constexpr int kRowBlocks = Base::kTileM / kRowBlock;
  static constexpr int kMaxRowBlocks = (kRowBlocks + kCtas - 1) / kCtas;

  // Of the tile's blocks of 16 rows, the first that a CTA of the cluster finishes; of kCtas, the
  // end.
  __host__ __device__ static constexpr int first_row_block(int rank) {
    return (rank * kRowBlocks + kCtas - 1) / kCtas;
  }
};

template <class S>
struct alignas(hopper::kSwizzleAtomBytes) SplitShared {
  using T = typename S::T;
  struct Operands {
    T w[S::kConfig.w_stages][S::kTileM * kTileK];
    T e[kConsumers][S::kConfig.e_stages][kTileK * kUnitColumns];
  };
  struct Results {
    // Of each CTA of the cluster, each block of rows, the eight sums of each thread.
    float4 sums[S::kCtas][kConsumers][S::kMaxRowBlocks][2][kGroupThreads];
    alignas(hopper::kSwizzleAtomBytes)
        T staging[kConsumers][2][S::kMaxRowBlocks * kRowBlock * kUnitColumns];
  };
  union {
    Operands operands;
    Results results;
  };
  typename S::RingW ring_w;
  typename S::RingE ring_e[kConsumers];
};

struct SplitParams {
  struct Side {
    CUtensorMap w;  // [M, K], box kTileM x 64
    CUtensorMap e;  // [B or U, K, N], box 1 x 64 x 64
    int32_t k_blocks;
  };
  Side candidates;
  Side users;                   // k_blocks 0 where there are none
  const int32_t* cand_to_user;  // [B]
  const void* bias;             // [M] or null
  void* out;                    // [B, M, N]
  void* preact;                 // as out, or null
  int32_t n_users, M, N;
  int32_t m_tiles, units, units_per_row;
  Activation activation;
};

// What a CTA works on.
struct SplitPlace {
  int rank;
  int32_t first_m;
  int32_t first_unit;              // of consumer 0
  int32_t first_block, end_block;  // of K, candidates' before users'

  __device__ bool has_unit(const SplitParams& params, int consumer) const {
    return first_unit + consumer < params.units;
  }
};

template <class S>
__device__ inline SplitPlace split_place(const SplitParams& params) {
  const int rank = static_cast<int>(hopper::cluster_cta_rank());
  const auto cluster = static_cast<int32_t>(hopper::cluster_index());
  const int32_t blocks = params.candidates.k_blocks + params.users.k_blocks;
  return {rank, cluster % params.m_tiles * S::kTileM, cluster / params.m_tiles * kConsumers,
          rank * blocks / S::kCtas, (rank + 1) * blocks / S::kCtas};
}

// ---- loads -------------------------------------------------------------------------------------
template <class S>
__device__ void load_split_w(SplitShared<S>& shared, const SplitParams& params,
                             const SplitPlace& place) {
  typename S::RingW::Position position;
  for (int32_t block = place.first_block; block < place.end_block; ++block, position.advance()) {
    const int32_t of_users = block - params.candidates.k_blocks;
    hopper::Barrier& full = shared.ring_w.produce(position, S::kConfig.w_bytes());
    hopper::tma_load(
        shared.operands.w[position.slot], of_users < 0 ? params.candidates.w : params.users.w, full,
        hopper::L2Hint::kNormal, (of_users < 0 ? block : of_users) * kTileK, place.first_m);
  }
}

template <class S>
__device__ void load_split_e(SplitShared<S>& shared, const SplitParams& params,
                             const SplitPlace& place, int consumer) {
  if (!place.has_unit(params, consumer)) return;
  const Unit unit = unit_at(place.first_unit + consumer, params.units_per_row);
  const int32_t user = params.cand_to_user[unit.row];
  // Of a row without a user the sums are replaced: anybody's embeddings will do.
  const int32_t user_row = user < 0 || user >= params.n_users ? 0 : user;
  auto& ring = shared.ring_e[consumer];
  typename S::RingE::Position position;
  for (int32_t block = place.first_block; block < place.end_block; ++block, position.advance()) {
    const int32_t of_users = block - params.candidates.k_blocks;
    hopper::Barrier& full = ring.produce(position, S::kConfig.e_bytes());
    hopper::tma_load(shared.operands.e[consumer][position.slot],
                     of_users < 0 ? params.candidates.e : params.users.e, full,
                     hopper::L2Hint::kNormal, unit.first_n,
                     (of_users < 0 ? block : of_users) * kTileK,
                     of_users < 0 ? unit.row : user_row);
  }
}

// ---- consumers ---------------------------------------------------------------------------------
template <class S>
__device__ inline void multiply_split(SplitShared<S>& shared, const SplitParams& params,
                                      const SplitPlace& place, int consumer, Sums<S>& sums) {
  auto& ring_w = shared.ring_w;
  auto& ring_e = shared.ring_e[consumer];
  Slots<S> at;
  const int32_t blocks = place.end_block - place.first_block;
  if (!place.has_unit(params, consumer)) {
    // The other consumer's blocks of W are let go by one thread.
    if (threadIdx.x % kGroupThreads != 0) return;
    for (int32_t i = 0; i < blocks; ++i, at.w.advance()) {
      ring_w.wait_full(at.w);
      ring_w.release(at.w);
    }
    return;
  }
  if (blocks == 0) {
#pragma unroll
    for (float& sum : sums) sum = 0;
    return;
  }
  const uint64_t w = hopper::descriptor<hopper::Major::kK>(shared.operands.w[0]);
  const uint64_t e = hopper::descriptor<hopper::Major::kMn>(shared.operands.e[consumer][0]);
  multiply_blocks<S>(ring_w, ring_e, at, w, e, blocks, sums);
  hopper::wgmma_wait<0>();
  hopper::fence_registers(sums);
}

// Sends the sums of each block of rows to the CTA that finishes it.
template <class S>
__device__ inline void send_sums(SplitShared<S>& shared, const SplitPlace& place, int consumer,
                                 const Sums<S>& sums) {
  const int thread = threadIdx.x % kGroupThreads;
#pragma unroll
  for (int owner = 0; owner < S::kCtas; ++owner) {
    const int first = S::first_row_block(owner);
    auto& places = shared.results.sums[place.rank][consumer];
#pragma unroll
    for (int block = first; block < S::first_row_block(owner + 1); ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const s = &sums[8 * block + 4 * half];
        hopper::store_in_cluster(&places[block - first][half][thread], owner,
                                 {s[0], s[1], s[2], s[3]});
      }
    }
  }
}

// Adds what the CTAs sent, finishes this CTA's blocks of rows and stores them.
template <class S>
__device__ inline void finish_split(SplitShared<S>& shared, const SplitParams& params,
                                    const SplitPlace& place, int consumer) {
  using T = typename S::T;
  const int thread = threadIdx.x % kGroupThreads;
  const int first = S::first_row_block(place.rank);
  const int blocks = S::first_row_block(place.rank + 1) - first;
  const int32_t first_m = place.first_m + first * kRowBlock;
  const Unit unit = unit_at(place.first_unit + consumer, params.units_per_row);
  const int32_t user = params.cand_to_user[unit.row];
  const bool has_user = user >= 0 && user < params.n_users;
  const float fill = user == kPaddingUser ? 0 : std::numeric_limits<float>::quiet_NaN();
  auto& staging = shared.results.staging[consumer];
  const auto bias_of = [&](int32_t m) {
    return params.bias != nullptr && m < params.M
               ? static_cast<float>(static_cast<const T*>(params.bias)[m])
               : 0.0f;
  };

  with_activation(params.activation, [&](auto activation) {
    for (int block = 0; block < blocks; ++block) {
      float sums[8] = {};
#pragma unroll
      for (int cta = 0; cta < S::kCtas; ++cta) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 sent = shared.results.sums[cta][consumer][block][half][thread];
          float* const sum = &sums[4 * half];
          sum[0] += sent.x, sum[1] += sent.y, sum[2] += sent.z, sum[3] += sent.w;
        }
      }
      uint32_t before[4], after[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t m = first_m + block * kRowBlock + i / 2 * 8 + thread % 4 * 2;
        float low = sums[2 * i] + bias_of(m), high = sums[2 * i + 1] + bias_of(m + 1);
        constexpr Activation kActivation = decltype(activation)::value;
        before[i] = has_user ? pack<T>(low, high) : 0;
        after[i] = has_user ? pack<T>(apply<kActivation>(low), apply<kActivation>(high))
                            : pack<T>(fill, fill);
      }
      const uint32_t offset = block * kRowBlock * hopper::kSwizzleRowBytes;
      hopper::store_tiles_transposed(staging_of_lane(staging[0]) + offset, after);
      if (params.preact != nullptr) {
        hopper::store_tiles_transposed(staging_of_lane(staging[1]) + offset, before);
      }
    }
  });
  hopper::barrier_wait(hopper::numbered(NamedBarrier::kStaged, consumer), kGroupThreads);
  const auto store = [&](const T* staged, void* result) {
    for (int i = thread; i < blocks * kRowBlock * 8; i += kGroupThreads) {
      const int row = i / 8, chunk = i % 8;  // of 16 bytes
      const int32_t m = first_m + row, n = unit.first_n + chunk * 8;
      if (m >= params.M || n >= params.N) continue;
      const auto* from =
          reinterpret_cast<const char*>(staged) + hopper::swizzle_128(row, 16 * chunk);
      T* const to = static_cast<T*>(result) + (int64_t{unit.row} * params.M + m) * params.N + n;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    }
  };
  store(staging[0], params.out);
  if (params.preact != nullptr) store(staging[1], params.preact);
}

template <class S>
__global__ void __launch_bounds__(LinearCompressionKernel::kThreads, 1)
    linear_compression_split_sm90(const __grid_constant__ SplitParams params) {
  extern __shared__ char unaligned[];
  const uint32_t base = hopper::shared_address(unaligned);
  constexpr uint32_t kAtom = hopper::kSwizzleAtomBytes;
  auto& shared = *reinterpret_cast<SplitShared<S>*>(unaligned + (kAtom - base % kAtom) % kAtom);
  const SplitPlace place = split_place<S>(params);
  if (threadIdx.x == 0) {
    shared.ring_w.init();
    for (auto& ring : shared.ring_e) ring.init();
    hopper::fence_barrier_init();
  }
  __syncthreads();
  const int group = hopper::warp_group_index();
  if (group == kConsumers) {
    hopper::give_registers<LinearCompressionKernel::kOtherRegisters>();
    const int warp = hopper::warp_index() % 4;
    if (hopper::elect_one()) {
      if (warp < kConsumers) {
        load_split_e<S>(shared, params, place, warp);
      } else if (warp == kConsumers) {
        load_split_w<S>(shared, params, place);
      }
    }
    __syncwarp();
    hopper::cluster_sync();
    hopper::cluster_sync();
    return;
  }
  hopper::take_registers<LinearCompressionKernel::kConsumerRegisters>();
  Sums<S> sums;
  multiply_split<S>(shared, params, place, group, sums);
  hopper::cluster_sync();  // nobody's operands are read any more
  const bool has_unit = place.has_unit(params, group);
  if (has_unit) send_sums<S>(shared, place, group, sums);
  hopper::cluster_sync();  // all sums are where they belong
  if (has_unit) finish_split<S>(shared, params, place, group);
}

}  // namespace ikbo::linear_compression
