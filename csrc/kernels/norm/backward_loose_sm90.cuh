// The gradients of a norm (backward_sm90.cuh) for interleaved columns, an element at a time: as
// forward_loose_sm90.cuh.
//
// grad_x goes back over x in its stage where it has x's type and place modulo 16 bytes, and leaves
// from there; else it is stored straight to global memory. Registers hold weight and sums, and what
// is waiting for its row's sums: but of four vectors a lane, which are read twice.
#pragma once

#include "kernels/norm/backward_sm90.cuh"
#include "kernels/norm/loose.cuh"

namespace ikbo::norm {

template <class T, int kVectors, int kLanes>
__global__ void __launch_bounds__(kBackwardThreads<kVectors, (kLanes > 0)>, 1)
    norm_backward_loose_sm90(const __grid_constant__ NormBackward p,
                             const __grid_constant__ NormConfig config) {
  using At = LooseColumns<kVectors, 16 / sizeof(T), kLanes>;
  constexpr bool kInWarp = At::kInWarp;
  constexpr int kSlots = At::kSlots;
  constexpr int kRowLanes = At::kStep, kAtOnce = 32 / kRowLanes;  // rows of a warp at once
  constexpr bool kHoldsRow = kSlots <= 24;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Exchange shared;
  constexpr int kRings = kInWarp ? kBackwardRings : 1;
  __shared__ Staged operands[kRings][3];
  __shared__ hopper::Barrier full[kRings][NormConfig::kMaxStages];

  const NormMapping& m = config.mapping;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int ring_index = kInWarp ? warp : 0;
  const Place place = Place::of_cta<kInWarp>(config);
  const int mine = lane / kRowLanes;
  const At at = At::of_span(m, place.first_column);
  Staged* const staged = operands[ring_index];
  const bool has_third = p.grad_residual_out.data != nullptr;
  const auto touches = [&](const NormMatrix& m) { return Staged::touches(m, at.count, config); };
  Ring<kInWarp, false> ring{
      config,
      static_cast<uint32_t>(p.rows),
      staged,
      has_third ? 3 : 2,
      touches(p.x) && touches(p.grad_y) && (!has_third || touches(p.grad_residual_out)),
      shared_bytes + ring_index * config.stages * config.stage_bytes,
      full[ring_index],
      nullptr,
      nullptr,
      place.team + ring_index * (config.owners / config.rings)};
  if (kInWarp || threadIdx.x < 32) {
    if (lane < config.stages) hopper::init(full[ring_index][lane], 1);
    if (lane == 0) {
      lay_out(staged, place, at.count, config, p.x, p.grad_y, p.grad_residual_out);
      if constexpr (!kInWarp) shared.init();
    }
    hopper::fence_barrier_init();
    __syncwarp();
  }
  begin(p, config);
  if (kInWarp || threadIdx.x == 0) ring.load_first();
  // Adding -0 changes nothing, not even the sign of a zero.
  const float weight_offset = p.weight_offset == 0.0f ? -0.0f : p.weight_offset;
  float weight[kSlots];
  with_type<T>(p.weight.type, [&](auto zero) {
    const char* const from = Target(p.weight, place).data;
    at.each([&](int i) {
      const float own = p.weight.data ? at.template load<decltype(zero)>(from, i) : 1.0f;
      weight[i] = own + weight_offset;
    });
  });
  meet<kInWarp>(place);

  float weight_sums[kSlots] = {};
  float bias_sums[kSlots] = {};

  const bool layer = p.mean != nullptr;
  const float per_column = 1.0f / static_cast<float>(m.columns);
  const TurnSums merge{layer, false};
  uint32_t turn = 0;
  // The statistics of a turn's rows are loaded one turn ahead.
  float next_rstd = 0.0f, next_mean = 0.0f;
  const auto load_statistics = [&](uint32_t row) {
    if (row >= ring.rows) return;
    const uint64_t of_row =
        uint64_t{row} * static_cast<uint32_t>(config.groups) + static_cast<uint32_t>(place.group);
    next_rstd = p.rstd[of_row];
    if (layer) next_mean = p.mean[of_row];
  };
  load_statistics(ring.first_row() + mine);

  const Outlet<T, kInWarp> outlet{
      ring, staged[0], p.grad_x, place,
      p.grad_x.data && config.stages >= 3 && lies_as(p.grad_x, p.x, place, at.count, config)};
  uint32_t turns = 0;  // of the ring: where a row has a CTA, those of `turn`
  // After the barrier of a CTA's row: all have done with the row before.
  const auto between = [&] {
    if (threadIdx.x >= 32 || turn == 1) return;
    outlet.renew(outlet.before(ring.slot), ring.block - config.owners, turn == 2);
  };

  while (ring.wait()) {
    const uint32_t first_row = ring.first_row();
    const int count = ring.rows_from(first_row);
#pragma unroll 1
    for (int i = 0; i < (kInWarp ? count : 1); i += kAtOnce) {
      const bool has_row = kAtOnce == 1 || i + mine < count;
      const int in_stage = has_row ? i + mine : i;
      const uint32_t row = first_row + in_stage;
      // Long rows lack the registers for addresses of theirs.
      const Place here = kVectors > 3 ? place.recomputed(config) : place;
      const auto in_stage_of = [&](int o) {
        return const_cast<char*>(
            staged[o].template in_stage<false>(ring.stage(), first_row, in_stage));
      };
      char* const x = in_stage_of(0);
      const char* const grad = in_stage_of(1);
      const float rstd = next_rstd, shift = -next_mean * rstd;
      load_statistics(kInWarp && i + kAtOnce < count
                          ? first_row + i + kAtOnce + mine
                          : first_row + config.owners * config.rows_per_stage + mine);

      // x and g of the row, then its grad_x.
      float held[kHoldsRow ? kSlots : 1], g[kSlots];
      float4 sums{0.0f, 0.0f, 0.0f, 0.0f};  // of g * xhat and of g
      // An RMSNorm's rows without a bias need no sums of grad_y.
      const auto first_pass = [&](auto zero, auto alone) {
        at.each([&](int i) {
          const float value = at.template load<T>(x, i);
          const float own = fmaf(value, rstd, shift);
          const float from = at.template load<decltype(zero)>(grad, i);
          if constexpr (!alone) {
            bias_sums[i] += from;
          }
          weight_sums[i] = fmaf(from, own, weight_sums[i]);
          const float weighed = __fmul_rn(from, weight[i]);
          sums.x = fmaf(weighed, own, sums.x);
          if constexpr (!alone) sums.y += weighed;
          if constexpr (kHoldsRow) held[i] = value, g[i] = weighed;
        });
      };
      if (has_row) {
        with_type<T>(p.grad_y.type, [&](auto zero) {
          if (layer || config.bias_sums) {
            first_pass(zero, std::false_type{});
          } else {
            first_pass(zero, std::true_type{});
          }
        });
      }
      if constexpr (kInWarp) {
        sums = merge.template over<kRowLanes>(sums, kRowLanes);
      } else {
        sums = merge.template over<32>(sums, 32);
        sums = exchange(shared, turn, place.cluster, sums, merge, between);
      }
      if (!has_row) continue;

      const GradOfX of{{sums.x, sums.y}, per_column, rstd, shift, layer};
      if constexpr (kHoldsRow) {
        at.each([&](int i) { g[i] = of(held[i], g[i]); });
      } else {
        asm volatile("" ::: "memory");  // else the compiler would keep what it has read
        with_type<T>(p.grad_y.type, [&](auto zero) {
          at.each([&](int i) {
            const float from = at.template load<decltype(zero)>(grad, i);
            g[i] = of(at.template load<T>(x, i), __fmul_rn(from, weight[i]));
          });
        });
      }
      if (has_third) {
        const char* const third = in_stage_of(2);
        with_type<T>(p.grad_residual_out.type, [&](auto zero) {
          at.each([&](int i) { g[i] += at.template load<decltype(zero)>(third, i); });
        });
      }
      const auto store = [&](const NormMatrix& m) {
        char* const to = Target(m, here).row(row);
        with_type<T>(m.type, [&](auto zero) {
          using U = decltype(zero);
          at.each([&](int i) { at.store(to, i, static_cast<U>(g[i])); });
        });
      };
      if (outlet.in_place) {
        at.each([&](int i) { at.store(x, i, static_cast<T>(g[i])); });
      } else if (p.grad_x.data) {
        store(p.grad_x);
      }
      if (p.grad_residual.data) store(p.grad_residual);
    }
    if constexpr (kInWarp) {
      __syncwarp();
      outlet.renew(ring.slot, ring.block, turns++ == 0);
    }
    ring.advance();
  }
  hopper::allow_next_kernel();
  if (!kInWarp && outlet.in_place) {
    __syncthreads();
    if (threadIdx.x < 32 && turn > 0) {
      outlet.store(outlet.before(ring.slot), ring.block - config.owners);
    }
  }
  outlet.finish();

  const int64_t partial =
      (int64_t{place.team} * config.groups + place.group) * m.columns + place.first_column;
  if constexpr (kInWarp) {
    const auto add_up = [&](const float (&sums)[kSlots], float* partials) {
      add_up_warps(at, sums, shared_bytes, config.rings, partials + partial);
    };
    if (p.weight_partials) add_up(weight_sums, p.weight_partials);
    if (config.bias_sums) add_up(bias_sums, p.bias_partials);
  } else {
    at.each([&](int i) {
      if (!at.has(i)) return;
      const int64_t column = partial + at.first + i * At::kStep;
      if (p.weight_partials) p.weight_partials[column] = weight_sums[i];
      if (config.bias_sums) p.bias_partials[column] = bias_sums[i];
    });
  }
  if (place.cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
