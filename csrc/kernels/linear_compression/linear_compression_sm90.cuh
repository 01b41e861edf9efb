// out[b] = act(W @ E[b] + part[u(b)] + bias[:, None]) for 16-bit W [M, K], E [B, K, N] with fp32
// sums: the candidates' product of linear compression, persistent and warp-specialised. Without a
// map it is the users' own product W @ E[u], whose result is the part.
//
// The 64-row side of wgmma is 64 columns of one E[b] (a "unit", MN-major in shared memory), the
// other side kTileM rows of W. A CTA keeps its rows of W and works on a unit for each consumer at
// once, so that every block of W is loaded once for both. Its warp groups:
// - Groups 0 and 1, consumers. They wait for a block of W and one of their own E, run wgmma, and
//   arrive on the slots' empty barriers once the products have completed. At the end of a tile they
//   wait for `filled`, add the part in the staging buffer to their sums, leave the results in its
//   place and arrive on `ready`.
// - Group 2. One lane of each warp: loads E of consumer 0; of consumer 1 (each waits for its
//   consumer); loads W (waits for both); stores, for each tile in the order in which they end:
//   waits until the staging buffer has been stored from, loads the user's part into it (`filled`;
//   the tile is still being multiplied), waits for `ready`, stores the buffer.
// column_schedule.h says which units and why consumers start apart: one's epilogue runs under the
// other's products. How far the other gets is what the ring of W is deep; E has a ring of its own
// for each, or who lags would hold up both.
//
// The part comes by TMA: sixteen-byte loads to registers a tile ahead, the part in the order of the
// sums, stall the warps that issue them behind the rings' traffic (3000 clocks a tile).
#pragma once

#include <limits>

#include "config/fast_divisor.h"
#include "config/linear_compression.h"
#include "hopper/dependent_launch.cuh"
#include "hopper/mbarrier.cuh"
#include "hopper/tma.cuh"
#include "hopper/warp_group.cuh"
#include "hopper/wgmma.cuh"
#include "kernels/activation.cuh"
#include "kernels/linear_compression/tile.cuh"
#include "kernels/numeric.cuh"

namespace ikbo::linear_compression {

// A consumer's share of the CTA's steps. In shared memory, where it costs consumers no registers.
struct Turn {
  int32_t before;  // steps that aren't for this consumer, before its first tile
  int32_t tiles;
  int32_t after;  // and after its last
};

// What the storer tells a consumer with `filled`.
enum class Join {
  kNothing,  // no part
  kPart,     // the user's part, which is in the staging buffer
  kZero,     // a padding row: zeros replace everything
  kNan,      // a row whose user doesn't exist
};
struct Filled {
  Join join;
  int buffer;
};

template <class S>
struct alignas(hopper::kSwizzleAtomBytes) Shared {
  using T = typename S::T;
  T w[S::kConfig.w_stages][S::kTileM * S::kTileK];
  T e[kConsumers][S::kConfig.e_stages][S::kTileK * kUnitColumns];
  T staging[S::kStaging][S::kTileM * kUnitColumns];
  float bias[S::kTileM];
  typename S::RingW ring_w;
  typename S::RingE ring_e[kConsumers];
  // By consumer, not by buffer: each waits for its own tiles only, in their order.
  hopper::Barrier filled[kConsumers];
  hopper::Barrier ready[kConsumers];
  Filled told[kConsumers];
  Turn turns[kConsumers];
};

struct Params {
  CUtensorMap w;                // [M, K], box kTileM x 64, one swizzle span
  CUtensorMap e;                // [B, K, N], box 1 x kTileK x 64
  CUtensorMap part;             // [U, M, N], box 1 x kTileM x 64; unused without a map
  CUtensorMap out;              // [B, M, N], as part
  CUtensorMap preact;           // as out, where saves_preact
  const int32_t* cand_to_user;  // [B], or null: no part is added
  const void* bias;             // [M] or null
  int32_t n_users;
  int32_t M;
  FastDivisor m_tiles;
  int32_t units_per_row;
  ColumnSchedule schedule;
  Activation activation;
  bool saves_preact;
  bool waits_at_start;  // for the kernel before, whose results may be any of the inputs
};

// A CTA's place: neighbouring CTAs have the same columns and neighbouring rows of W.
struct Place {
  int32_t worker;
  int32_t m_tile;
};
__device__ inline Place place_of_cta(const Params& params) {
  const int32_t cta = blockIdx.x, worker = params.m_tiles.divide(cta);
  return {worker, params.m_tiles.remainder(cta, worker)};
}

__device__ inline Turn turn_of(const ColumnSchedule& schedule, int32_t worker, int consumer) {
  return {schedule.first_step(consumer), schedule.tiles(worker, consumer),
          schedule.steps(worker) - schedule.end_step(worker, consumer)};
}

__device__ inline Unit unit_of(const Params& params, int32_t worker, int consumer, int32_t tile) {
  return unit_at(params.schedule.unit(worker, consumer, tile), params.units_per_row);
}

// ---- loads -------------------------------------------------------------------------------------
// The steps [first, end) of the loads of W, or of a consumer's E.
template <class S>
__device__ void load_w(Shared<S>& shared, const Params& params, int32_t first, int32_t end) {
  const int32_t first_m = place_of_cta(params).m_tile * S::kTileM;
  const int32_t k_blocks = params.schedule.k_blocks;
  typename S::RingW::Position position;
  position.advance(static_cast<uint32_t>(first));
  int32_t k = first % k_blocks;
  for (int32_t step = first; step < end; ++step, position.advance()) {
    hopper::Barrier& full = shared.ring_w.produce(position, S::kConfig.w_bytes());
#pragma unroll
    for (int span = 0; span < S::kTileK; span += kSwizzleK) {
      hopper::tma_load(shared.w[position.slot] + span * S::kTileM, params.w, full,
                       hopper::L2Hint::kNormal, k * S::kTileK + span, first_m);
    }
    if (++k == k_blocks) k = 0;
  }
}

template <class S>
__device__ void load_e(Shared<S>& shared, const Params& params, int consumer, int32_t first,
                       int32_t end) {
  const int32_t worker = place_of_cta(params).worker;
  const int32_t k_blocks = params.schedule.k_blocks;
  auto& ring = shared.ring_e[consumer];
  typename S::RingE::Position position;
  position.advance(static_cast<uint32_t>(first));
  int32_t tile = first / k_blocks, left = 0;  // blocks of the tile
  int32_t k = 0;
  Unit unit{};
  for (int32_t step = first; step < end; ++step, position.advance()) {
    if (left == 0 || step == first) {
      if (step != first) ++tile;
      const int32_t done = step - tile * k_blocks;
      left = k_blocks - done;
      unit = unit_of(params, worker, consumer, tile);
      // A tile starts in the block of W at which the consumer does.
      k = params.schedule.first_step(consumer) + done;
      if (k >= k_blocks) k -= k_blocks;
    }
    hopper::Barrier& full = ring.produce(position, S::kConfig.e_bytes());
    hopper::tma_load(shared.e[consumer][position.slot], params.e, full, hopper::L2Hint::kNormal,
                     unit.first_n, k * S::kTileK, unit.row);
    if (++k == k_blocks) k = 0;
    --left;
  }
}

// ---- stores ------------------------------------------------------------------------------------
// The tiles of a CTA in the order in which they end.
struct TileWalk {
  const ColumnSchedule& schedule;
  int32_t worker;
  int32_t tile = 0;
  int consumer = 0;

  __device__ bool has_tile() const { return tile < schedule.tiles(worker, consumer); }
  // Consumer 1 has no more tiles than consumer 0.
  __device__ void next() {
    if (++consumer == kConsumers || !has_tile()) {
      consumer = 0;
      ++tile;
    }
  }
};

template <class S>
__device__ void store(Shared<S>& shared, const Params& params) {
  const Place place = place_of_cta(params);
  const int32_t first_m = place.m_tile * S::kTileM;
  // A tile has a staging buffer once for each result: the pre-activation, where it is saved, and
  // out. Buffers are told of one at a time to each consumer.
  static_assert(S::kStaging <= kConsumers);
  const int results = params.saves_preact ? 2 : 1;

  TileWalk filling{params.schedule, place.worker}, storing = filling;
  int result_to_fill = 0, buffer_to_fill = 0, buffer = 0;
  // Read a tile ahead: it may come from DRAM.
  const auto user_to_fill = [&] {
    if (params.cand_to_user == nullptr || !filling.has_tile()) return kPaddingUser;
    return params.cand_to_user[unit_of(params, place.worker, filling.consumer, filling.tile).row];
  };
  int32_t user = user_to_fill();
  const auto fill_next = [&] {
    if (!filling.has_tile()) return;
    const int c = filling.consumer;
    const bool first = result_to_fill == 0, last = result_to_fill + 1 == results;
    Filled& told = shared.told[c];
    told = {Join::kNothing, buffer_to_fill};
    bool loads_part = false;
    if (params.cand_to_user != nullptr) {
      if (user < 0 || user >= params.n_users) {
        // The pre-activation is zero for both.
        told.join = user == kPaddingUser || !last ? Join::kZero : Join::kNan;
      } else if (first) {  // a second result finds the part in the sums
        told.join = Join::kPart;
        loads_part = true;
        hopper::arrive_expect_bytes(shared.filled[c], S::kConfig.staging_bytes());
        hopper::tma_load(shared.staging[buffer_to_fill], params.part, shared.filled[c],
                         hopper::L2Hint::kNormal,
                         unit_of(params, place.worker, c, filling.tile).first_n, first_m, user);
      }
    }
    if (!loads_part) hopper::arrive(shared.filled[c]);
    if (++buffer_to_fill == S::kStaging) buffer_to_fill = 0;
    if (last) {
      filling.next();
      user = user_to_fill();
    }
    result_to_fill = last ? 0 : result_to_fill + 1;
  };

  // From here on this thread reads the users' product. Also where no part is read, the kernel that
  // makes it has ended before this one does.
  hopper::wait_for_previous_kernel();
  fill_next();
  if (S::kStaging > 1 && results == 1) fill_next();
  uint32_t phases = 0;  // a bit a consumer
  for (; storing.has_tile(); storing.next()) {
    const int c = storing.consumer;
    const Unit unit = unit_of(params, place.worker, c, storing.tile);
    for (int result = 0; result < results; ++result) {
      hopper::wait(shared.ready[c], phases >> c & 1);
      phases ^= 1u << c;
      hopper::tma_store(result + 1 == results ? params.out : params.preact, shared.staging[buffer],
                        hopper::L2Hint::kEvictFirst, unit.first_n, first_m, unit.row);
      hopper::tma_store_commit();
      if (++buffer == S::kStaging) buffer = 0;
      hopper::tma_store_wait_read<0>();
      fill_next();
    }
  }
}

// ---- consumers ---------------------------------------------------------------------------------
// Pairs [kFirst, kFirst + kCount) of the part.
template <class S, int kFirst, int kCount>
__device__ inline void read_part(Pairs<S>& part, typename S::T* staging) {
  char* const first = staging_of_lane(staging);
#pragma unroll
  for (int i = kFirst; i < kFirst + kCount; i += 4) {
    hopper::load_tiles_transposed(*reinterpret_cast<uint32_t (*)[4]>(&part[i]),
                                  first + i * 4 * hopper::kSwizzleRowBytes);
  }
}

template <class S, int kFirst, int kCount>
__device__ inline void add_part(Sums<S>& sums, const Pairs<S>& part) {
#pragma unroll
  for (int i = kFirst; i < kFirst + kCount; ++i) {
    const float2 pair = unpack<typename S::T>(part[i]);
    sums[2 * i] += pair.x;
    sums[2 * i + 1] += pair.y;
  }
}

// Adds bias[m] to the sums of each row m of W.
template <class S>
__device__ inline void add_bias(Sums<S>& sums, const float* bias) {
  const float* const mine = bias + threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < S::kTileM; m += 8) {
    const float2 b = *reinterpret_cast<const float2*>(mine + m);
    float* const sum = &sums[m / 2];
    sum[0] += b.x, sum[1] += b.y, sum[2] += b.x, sum[3] += b.y;
  }
}

template <class S, Activation kActivation>
__device__ inline void round_results(Pairs<S>& results, const Sums<S>& sums) {
#pragma unroll
  for (int i = 0; i < S::kTileM / 4; ++i) {
    results[i] =
        pack<typename S::T>(apply<kActivation>(sums[2 * i]), apply<kActivation>(sums[2 * i + 1]));
  }
}

template <class S>
__device__ inline void stage_results(typename S::T* staging, const Pairs<S>& results) {
  char* const first = staging_of_lane(staging);
#pragma unroll
  for (int i = 0; i < S::kTileM / 4; i += 4) {
    hopper::store_tiles_transposed(first + i * 4 * hopper::kSwizzleRowBytes,
                                   *reinterpret_cast<const uint32_t (*)[4]>(&results[i]));
  }
}

// By the consumers' threads.
template <class S>
__device__ inline void read_bias(Shared<S>& shared, const Params& params, int32_t m_tile) {
  const auto* bias = static_cast<const typename S::T*>(params.bias);
  const int32_t first_m = m_tile * S::kTileM;
  for (int m = threadIdx.x; m < S::kTileM; m += kConsumers * kGroupThreads) {
    shared.bias[m] = first_m + m < params.M ? static_cast<float>(bias[first_m + m]) : 0.0f;
  }
}

template <class S>
__device__ void consume(Shared<S>& shared, const Params& params, int consumer) {
  const int thread = threadIdx.x % kGroupThreads;
  const Turn& turn = shared.turns[consumer];
  const int32_t k_blocks = params.schedule.k_blocks;
  const uint64_t w = hopper::descriptor<hopper::Major::kK>(shared.w[0]);
  const uint64_t e = hopper::descriptor<hopper::Major::kMn>(shared.e[consumer][0]);
  auto& ring_w = shared.ring_w;
  auto& ring_e = shared.ring_e[consumer];
  Slots<S> at;

  // Blocks of W are for both consumers: those that aren't for this one are let go by one thread.
  // The others may not look for a later block before it has seen them.
  const auto skip = [&](int32_t blocks) {
    typename S::RingW::Position skipped = at.w;
    at.w.advance(static_cast<uint32_t>(blocks));
    if (thread != 0) return;
    for (int32_t i = 0; i < blocks; ++i, skipped.advance()) {
      ring_w.wait_full(skipped);
      ring_w.release(skipped.slot);
    }
  };
  if (turn.before > 0) {
    skip(turn.before);
    hopper::barrier_wait(hopper::numbered(NamedBarrier::kStarted, consumer), kGroupThreads);
  }

  Sums<S> sums;
  Pairs<S> pairs;  // the part, then the results
  uint32_t filled_phase = 0;
  Filled told{};
  const auto wait_filled = [&] {
    hopper::wait(shared.filled[consumer], filled_phase);
    filled_phase ^= 1;
    told = shared.told[consumer];
  };
  const auto finish = [&](auto activation) {
    round_results<S, decltype(activation)::value>(pairs, sums);
    if (told.join == Join::kZero || told.join == Join::kNan) {
      const float value = told.join == Join::kZero ? 0 : std::numeric_limits<float>::quiet_NaN();
#pragma unroll
      for (uint32_t& pair : pairs) pair = pack<typename S::T>(value, value);
    }
    stage_results<S>(shared.staging[told.buffer], pairs);
    hopper::fence_shared_for_async();
    __syncwarp();
    if (thread % 32 == 0) hopper::arrive(shared.ready[consumer]);
  };

  for (int32_t tile = 0; tile < turn.tiles; ++tile) {
    multiply_blocks<S>(ring_w, ring_e, at, w, e, k_blocks, sums);
    // Half of the part is read under the last products (both halves would spill), and in one go:
    // ldmatrix, add and stmatrix in turns took three times as long.
    wait_filled();
    constexpr int kHalf = S::kTileM / 8;
    auto* const staging = shared.staging[told.buffer];
    if (told.join == Join::kPart) read_part<S, 0, kHalf>(pairs, staging);
    hopper::wgmma_wait<0>();
    hopper::fence_registers(sums);
    release_last<S>(ring_w, ring_e, at);
    if (told.join == Join::kPart) {
      add_part<S, 0, kHalf>(sums, pairs);
      read_part<S, kHalf, kHalf>(pairs, staging);
      add_part<S, kHalf, kHalf>(sums, pairs);
    }
    if (params.bias != nullptr) add_bias<S>(sums, shared.bias);
    if (params.saves_preact) {
      finish(std::integral_constant<Activation, Activation::kNone>{});
      wait_filled();
    }
    with_activation(params.activation, finish);
  }
  skip(turn.after);
}

template <class S>
__device__ void run_cta(const Params& params) {
  extern __shared__ char unaligned[];
  const uint32_t base = hopper::shared_address(unaligned);
  constexpr uint32_t kAtom = hopper::kSwizzleAtomBytes;
  auto& shared = *reinterpret_cast<Shared<S>*>(unaligned + (kAtom - base % kAtom) % kAtom);
  const Place place = place_of_cta(params);
  const int group = hopper::warp_group_index(), warp = hopper::warp_index() % 4;
  const bool is_consumer = group < kConsumers;
  const bool elected = hopper::elect_one();

  if (!is_consumer) {
    if (warp < kConsumers) {
      if (elected) hopper::prefetch_tensor_map(params.e);
      shared.ring_e[warp].init_by_warp();
    } else if (warp == kConsumers) {
      if (elected) hopper::prefetch_tensor_map(params.w);
      shared.ring_w.init_by_warp();
    } else if (elected) {
      if (params.cand_to_user != nullptr) hopper::prefetch_tensor_map(params.part);
      hopper::prefetch_tensor_map(params.out);
      for (int c = 0; c < kConsumers; ++c) {
        hopper::init(shared.filled[c], 1);
        hopper::init(shared.ready[c], kGroupThreads / 32);
        shared.turns[c] = turn_of(params.schedule, place.worker, c);
      }
    }
    hopper::fence_barrier_init();
    __syncwarp();
  }

  if (params.waits_at_start) hopper::wait_for_previous_kernel();
  // The next kernel may start where SMs are free, now that everything before this one has ended.
  hopper::allow_next_kernel();

  // The first blocks are on their way before the CTA meets: the rings' barriers are the loading
  // warps' own so far. No more than two, as the copy engine takes 300 clocks for a step and holds
  // up who asks for another.
  constexpr int32_t kEarlySteps = 2;
  int32_t loaded = 0, steps = 0;
  if (is_consumer) {
    if (params.bias != nullptr) read_bias<S>(shared, params, place.m_tile);
  } else if (warp < kConsumers) {
    steps = params.schedule.tiles(place.worker, warp) * params.schedule.k_blocks;
    loaded = min(steps, kEarlySteps);
    if (elected) load_e<S>(shared, params, warp, 0, loaded);
  } else if (warp == kConsumers) {
    steps = params.schedule.steps(place.worker);
    loaded = min(steps, kEarlySteps);
    if (elected) load_w<S>(shared, params, 0, loaded);
  }
  __syncthreads();
  if (is_consumer) {
    hopper::take_registers<LinearCompressionKernel::kConsumerRegisters>();
    consume<S>(shared, params, group);
    return;
  }
  hopper::give_registers<LinearCompressionKernel::kOtherRegisters>();
  if (!elected) return;
  if (warp < kConsumers) {
    load_e<S>(shared, params, warp, loaded, steps);
  } else if (warp == kConsumers) {
    load_w<S>(shared, params, loaded, steps);
  } else {
    store<S>(shared, params);
  }
}

template <class S>
__global__ void __launch_bounds__(LinearCompressionKernel::kThreads, 1)
    linear_compression_sm90(const __grid_constant__ Params params) {
  run_cta<S>(params);
}

}  // namespace ikbo::linear_compression
