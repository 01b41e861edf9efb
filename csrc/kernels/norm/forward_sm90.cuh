// y = norm(x [+ residual]) * (weight + weight_offset) + bias, in x's own or another type or, with a
// scale, in e4m3: of whole vectors at any address, or in clusters.
//
// Rows come through a ring in shared memory or, where they are few, directly.
//
// Weight and bias are on their way to shared memory while the first rows are, and stay there: each
// thread has its own columns' in a place of its own. Loaded for each row they cost a third of the
// time, and for the first row a trip to memory each, after that for x.
#pragma once

#include "kernels/norm/forward_row.cuh"

namespace ikbo::norm {

inline constexpr int kForwardRings = 8;

// Sixteen warps an SM, or eight with registers for 9 vectors.
template <int kVectors, bool kInWarp>
inline constexpr int kForwardThreads = norm_max_threads(NormPass::kForward, kVectors, kInWarp);
template <int kVectors, bool kInWarp>
inline constexpr int kForwardCtas = kVectors > 5 || !kInWarp ? 1 : 2;

template <class T, int kVectors, bool kInWarp, bool kFull>
__global__ void __launch_bounds__(kForwardThreads<kVectors, kInWarp>,
                                  kForwardCtas<kVectors, kInWarp>)
    norm_forward_sm90(const __grid_constant__ NormForward p,
                      const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Exchange shared;
  constexpr int kRings = kInWarp ? kForwardRings : 1;
  __shared__ Staged operands[kRings][2];
  __shared__ hopper::Barrier full[kRings][NormConfig::kMaxStages];
  __shared__ uint32_t drawn[NormConfig::kMaxStages];

  const NormMapping& m = config.mapping;
  const int lane = threadIdx.x % 32, ring_index = kInWarp ? threadIdx.x / 32 : 0;
  const Place place = Place::of_cta<kInWarp>(config);
  const int lanes = kInWarp ? m.lanes : 32;  // of a warp that a row has
  const int mine = kInWarp ? lane >> (__ffs(lanes) - 1) : 0;
  using At = Columns<kVectors, kVector, kInWarp, kFull>;
  const At at = At::of_span(m, kInWarp ? lane & (lanes - 1) : static_cast<int>(threadIdx.x));
  Ring<kInWarp, kFull> ring{config,
                            static_cast<uint32_t>(p.rows),
                            operands[ring_index],
                            p.residual.data ? 2 : 1,
                            Staged::touches(p.x, at.count, config) &&
                                (!p.residual.data || Staged::touches(p.residual, at.count, config)),
                            shared_bytes + ring_index * config.stages * config.stage_bytes,
                            full[ring_index],
                            !kInWarp && place.rank == 0 ? p.counter : nullptr,
                            drawn,
                            place.team * config.rings + ring_index};
  const bool is_first = kInWarp ? lane == 0 : threadIdx.x == 0;
  const bool in_first_warp = kInWarp || threadIdx.x < 32;
  if (!config.direct && in_first_warp) {
    if (lane < config.stages) hopper::init(full[ring_index][lane], 1);
    if (lane == 0) {
      lay_out(operands[ring_index], place, at.count, config, p.x, p.residual);
      if constexpr (!kInWarp) shared.init();
    }
    hopper::fence_barrier_init();
    __syncwarp();
  }
  begin(p, config);
  hopper::allow_next_kernel();
  if (!config.direct && (kInWarp || is_first)) ring.load_first();
  if (place.cluster > 1) {
    hopper::cluster_sync();
  } else if (!kInWarp && !config.direct) {
    __syncthreads();
  }

  ForwardRow<T, kVectors, kInWarp, kFull, true> of_row(p, config, at, shared,
                                                       shared_bytes + config.ring_bytes());
  of_row.keep_parameters(place);
  const int at_once = kInWarp ? config.at_once : 1;

  while (config.direct || ring.wait()) {
    const uint32_t first_row = config.direct
                                   ? (place.team * (kInWarp ? m.warps : 1) + ring_index) * at_once
                                   : ring.first_row();
    const int count = config.direct ? static_cast<int>(min(int64_t{at_once}, p.rows - first_row))
                                    : ring.rows_from(first_row);
#pragma unroll 1
    for (int i = 0; i < count; i += at_once) {
      const bool has_row = !kInWarp || i + mine < count;
      const int in_stage = has_row ? i + mine : i;
      const uint32_t row = first_row + in_stage;
      const auto refill = [&] {
        if ((kInWarp || is_first) && !config.direct && i + at_once >= count) {
          ring.load_again(ring.slot, ring.block);
        }
      };

      float values[kVectors][kVector];
      const Staged* const staged = operands[ring_index];
      const Place here = place.recomputed(config);
      // Apart, so that the compiler knows of each load which memory it is from.
      if (config.direct) {
        at.template load_row<T>(Target(p.x, here).row(row), values);
      } else {
        at.template load_row<T>(
            staged[0].template in_stage<kFull>(ring.stage(), first_row, in_stage), values);
      }
      if (p.residual.data) {
        // Apart, as x.
        if (config.direct) {
          of_row.add_residual(values, [] {}, Target(p.residual, here).row(row), here, row, has_row);
        } else {
          of_row.add_residual(
              values, [] {}, staged[1].template in_stage<kFull>(ring.stage(), first_row, in_stage),
              here, row, has_row);
        }
      }
      if constexpr (kInWarp) {
        __syncwarp();
        refill();
      }
      of_row.finish(values, here, row, has_row, refill);
    }
    if (config.direct) break;
    ring.advance();
  }
  if (place.cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
