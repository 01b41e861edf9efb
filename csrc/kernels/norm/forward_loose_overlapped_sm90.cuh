// The forward for interleaved columns (forward_loose_sm90.cuh), rows over warps, alone or in a
// cluster. As in forward_overlapped_sm90.cuh the warps take the sums of the row ahead before they
// finish a row, whose elements wait in registers. A warp more, the porter, exchanges the sums,
// stores results from the stages and loads them again:
//
//   of a row  warps:  wait full[stage], read it, sums -> of_warp, arrive partial[b]
//             porter: wait partial[b], merge, also over the cluster; mean, rstd -> result[b],
//             arrive
//                     done[b]
//             warps:  (sums of the row ahead) wait done[b], results, arrive written[stage]
//             porter: (done of the row ahead) wait written[stage], store, load the stage before
#pragma once

#include "kernels/norm/forward_loose_sm90.cuh"
#include "kernels/norm/forward_overlapped_sm90.cuh"

namespace ikbo::norm {

// Two CTAs of 8 warps and the porter.
inline constexpr int kLooseOverlappedThreads = 576;

template <class T>
__global__ void __launch_bounds__(kLooseOverlappedThreads, 1)
    norm_forward_loose_overlapped_sm90(const __grid_constant__ NormForward p,
                                       const __grid_constant__ NormConfig config) {
  using At = LooseColumns<2, 16 / sizeof(T), 0>;
  constexpr int kSlots = At::kSlots;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ OverlappedExchange shared;
  __shared__ Exchange of_largest;
  __shared__ Staged staged[2];
  __shared__ hopper::Barrier full[NormConfig::kMaxStages], written[NormConfig::kMaxStages];
  __shared__ uint32_t drawn[NormConfig::kMaxStages];

  const NormMapping& m = config.mapping;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool is_porter = warp == m.warps;
  const Place place = Place::of_cta<false>(config);
  const At at = At::of_span(m, place.first_column);
  Ring<false, false> ring{config,
                          static_cast<uint32_t>(p.rows),
                          staged,
                          p.residual.data ? 2 : 1,
                          Staged::touches(p.x, at.count, config) &&
                              (!p.residual.data || Staged::touches(p.residual, at.count, config)),
                          shared_bytes,
                          full,
                          place.rank == 0 ? p.counter : nullptr,
                          drawn,
                          place.team};
  if (is_porter) {
    if (lane < config.stages) {
      hopper::init(full[lane], 1);
      hopper::init(written[lane], m.warps);
    }
    if (lane == 0) {
      lay_out(staged, place, at.count, config, p.x, p.residual);
      shared.init(m.warps);
      of_largest.init();
    }
    hopper::fence_barrier_init();
    __syncwarp();
  }
  begin(p, config);
  hopper::allow_next_kernel();
  if (is_porter && lane == 0) ring.load_first();
  __syncwarp();
  meet<false>(place);
  const bool in_place =
      config.stages >= 4 && !p.quantizes() && lies_as(p.y, p.x, place, at.count, config);
  if (is_porter) {
    const Outlet<T, false> outlet{ring, staged[0], p.y, place, in_place};
    const float per_column = 1.0f / static_cast<float>(m.columns);
    const Moments merge{p.layer, false, 1.0f / static_cast<float>(at.count), per_column};
    uint32_t turn = 0, blocks = 0, last_block = 0, last_phase = 0;
    int last_slot = 0;
#pragma unroll 1
    while (ring.wait()) {
      const uint32_t first_row = ring.first_row();
      const int count = ring.rows_from(first_row);
#pragma unroll 1
      for (int i = 0; i < count; ++i, ++turn) {
        const uint32_t b = turn & 1;
        const float4 sums = shared.sums(b, turn >> 1 & 1, merge, m.warps, lane, place);
        if (lane == 0) {
          const float rstd = inverse_root(fmaf(sums.y, per_column, p.eps));
          shared.result[b] = float4{sums.w, rstd, 0.0f, 0.0f};
          hopper::arrive(shared.done[b]);
          if (place.rank == 0) {
            const int64_t of_row = int64_t{first_row + i} * config.groups + place.group;
            if (p.mean) p.mean[of_row] = sums.w;
            if (p.rstd) p.rstd[of_row] = rstd;
          }
        }
        __syncwarp();
        if (i == 0 && blocks > 0) {
          hopper::wait(written[last_slot], last_phase);
          outlet.renew(last_slot, last_block, blocks == 1);
          __syncwarp();
        }
      }
      last_slot = ring.slot, last_phase = ring.phase, last_block = ring.block;
      ++blocks;
      ring.advance();
    }
    if (in_place && blocks > 0) {
      hopper::wait(written[last_slot], last_phase);
      outlet.store(last_slot, last_block);
    }
    outlet.finish();
  } else {
    const LooseParameters<T, 2, 0> parameters(p, place, at);
    const float part_columns = static_cast<float>(at.columns);
    const float per_part_column = 1.0f / part_columns;
    uint32_t exchanges = 0;

    // The row ahead, and the one whose sums are exchanged meanwhile. The elements of LayerNorm's
    // are deviations from the mean of this warp's.
    float next[kSlots] = {}, values[kSlots] = {};
    float next_mean = 0.0f, part_mean = 0.0f;
    char *next_x = nullptr, *x = nullptr;
    uint32_t first_row = 0, row = 0;
    int count = 0;

    const auto take_sums = [&](uint32_t buffer, int i) {
      const uint32_t next_row = first_row + i;
      const Place here = place.recomputed(config);
      next_x = const_cast<char*>(staged[0].template in_stage<false>(ring.stage(), first_row, i));
      at.each([&](int i) { next[i] = at.template load<T>(next_x, i); });
      if (p.residual.data) {
        with_type<T>(p.residual.type, [&](auto zero) {
          using U = decltype(zero);
          const char* const from = staged[1].template in_stage<false>(ring.stage(), first_row, i);
          at.each([&](int i) { next[i] += at.template load<U>(from, i); });
        });
        if (p.residual_out.data) {
          with_type<T>(p.residual_out.type, [&](auto zero) {
            using U = decltype(zero);
            char* const to = Target(p.residual_out, here).row(next_row);
            at.each([&](int i) { at.store(to, i, static_cast<U>(next[i])); });
          });
        }
      }
      float sum = 0.0f;
      if (p.layer) {
        sum = sum_of_slots(at, next, [](float value, float sum) { return sum + value; });
        sum = sum_lanes(sum, 32);
        next_mean = __fmul_rn(sum, per_part_column);
        at.each([&](int i) {
          if (at.has(i)) next[i] -= next_mean;
        });
      }
      float squares =
          sum_of_slots(at, next, [](float value, float sum) { return fmaf(value, value, sum); });
      squares = sum_lanes(squares, 32);
      __syncwarp();  // all have read the result of two rows ago
      if (lane == 0) {
        shared.of_warp[buffer][warp] = float4{sum, squares, part_columns, next_mean};
        hopper::arrive(shared.partial[buffer]);
      }
    };
    const auto finish = [&](float4 result) {
      const float rstd = result.y, shift = (part_mean - result.x) * rstd;
      at.each([&](int i) { values[i] = fmaf(values[i], rstd, shift); });
      const Place here = place.recomputed(config);
      parameters.apply(p, here, at, values);
      if (in_place) {
        at.each([&](int i) { at.store(x, i, static_cast<T>(values[i])); });
        return;
      }
      char* const to = Target(p.y, here, p.quantizes() ? 1 : size_of(p.y.type)).row(row);
      if (!p.quantizes()) {
        with_type<T>(p.y.type, [&](auto zero) {
          using U = decltype(zero);
          at.each([&](int i) { at.store(to, i, static_cast<U>(values[i])); });
        });
        return;
      }
      float scale;
      if (p.row_scales) {
        float largest = 0.0f;
        at.each([&](int i) {
          if (at.has(i)) largest = max_or_nan(largest, fabsf(values[i]));
        });
        const float4 part{max_lanes(largest, 32), 0.0f, 0.0f, 0.0f};
        largest = exchange(of_largest, exchanges, place.cluster, part, Largest{}, [] {}, m.warps).x;
        scale = scale_of_row(largest);
        if (threadIdx.x == 0 && place.rank == 0) {
          p.row_scales[int64_t{row} * config.groups + place.group] = scale;
        }
      } else {
        scale = *p.scale;
      }
      const float per_scale = 1.0f / scale;
      at.each([&](int i) { at.store(to, i, to_e4m3(values[i] * per_scale)); });
    };

    int i = 0, ended_slot = -1;  // the row's stage, where it is the last of it
#pragma unroll 1
    for (uint32_t turn = 0;; ++turn) {
      bool has_next = true;
      if (i == count) {
        has_next = ring.wait(), i = 0;
        first_row = ring.first_row(), count = has_next ? ring.rows_from(first_row) : 0;
      }
      if (has_next) take_sums(turn & 1, i);
      if (turn > 0) {
        const uint32_t ahead = turn - 1;
        hopper::wait(shared.done[ahead & 1], ahead >> 1 & 1);
        finish(shared.result[ahead & 1]);
        __syncwarp();
        if (ended_slot >= 0 && lane == 0) hopper::arrive(written[ended_slot]);
      }
      if (!has_next) break;
      at.each([&](int i) { values[i] = next[i]; });
      part_mean = next_mean, x = next_x, row = first_row + i;
      ++i;
      ended_slot = -1;
      if (i == count) {
        ended_slot = ring.slot;
        ring.advance();
      }
    }
  }
  __syncwarp();
  if (place.cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
