// y = norm(x [+ residual]) * (weight + weight_offset) + bias, in x's own or another type or, with a
// scale, in e4m3.
//
// A thread holds its columns of a row in fp32 registers, so the variance takes its two passes
// there. Over several warps and CTAs the parts' means and squared deviations are merged, in one
// exchange.
#pragma once

#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

inline constexpr int kForwardRings = 8;

// Of columns: their mean, the sum of squared deviations from it, and how many. An RMSNorm has the
// sum of squares in place of the second.
struct Moments {
  bool layer;

  __device__ float4 operator()(float4 part) const {
    const auto sum = [](float value) { return sum_lanes(value, kMaxWarps); };
    if (!layer) return {0.0f, sum(part.y), 0.0f, 0.0f};
    const float count = sum(part.z);
    const float mean = __fdividef(sum(part.x * part.z), count);
    const float away = part.x - mean;
    return {mean, sum(part.y + part.z * away * away), count, 0.0f};
  }
};

struct Largest {
  __device__ float4 operator()(float4 part) const {
    return {max_lanes(part.x, kMaxWarps), 0.0f, 0.0f, 0.0f};
  }
};

template <class T, int kVectors, bool kAligned>
__global__ void __launch_bounds__(kVectors == 4 ? 512 : 256, kVectors <= 2 ? 2 : 1)
    norm_forward_sm90(const __grid_constant__ NormForward p,
                      const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  // Short rows leave registers to hold weight and bias.
  constexpr bool kHoldsParameters = kVectors <= 2;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Exchange shared;
  __shared__ Staged operands[2];
  __shared__ Target weight_row, bias_row, y_rows, sum_rows;
  __shared__ hopper::Barrier full[kForwardRings * NormConfig::kMaxStages];
  __shared__ uint32_t drawn[NormConfig::kMaxStages];

  const NormMapping& m = config.mapping;
  const int cluster = m.cluster, lanes = m.lanes, groups = config.groups;
  const bool warp_rows = lanes <= 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = cluster > 1 ? static_cast<int>(hopper::cluster_cta_rank()) : 0;
  const int team = blockIdx.x / cluster, group = groups > 1 ? team % groups : 0;
  const int64_t first_column = rank * m.cta_columns;
  const Columns<kVectors, kVector, kAligned> at{
      lanes, m.thread_vectors, warp_rows ? lane & (lanes - 1) : static_cast<int>(threadIdx.x),
      static_cast<int>(min(m.cta_columns, m.columns - first_column))};

  const int ring_index = warp_rows ? warp : 0;
  const bool loads = warp_rows || warp == 0;
  Ring ring{config,
            static_cast<uint32_t>(p.rows),
            operands,
            p.residual.data ? 2 : 1,
            shared_bytes + ring_index * config.stages * config.stage_bytes,
            full + ring_index * config.stages,
            config.by_ticket ? p.ticket : nullptr,
            drawn,
            static_cast<uint32_t>(team / groups * config.rings + ring_index)};

  if (threadIdx.x == 0) {
    const int end = operands[0].init(p.x, group, first_column, at.count, 0, config.rows_per_stage);
    operands[1].init(p.residual, group, first_column, at.count, end, config.rows_per_stage);
    weight_row.init(p.weight, group, first_column);
    bias_row.init(p.bias, group, first_column);
    y_rows.init(p.y, group, first_column, p.quantizes() ? 1 : size_of(p.y.type));
    sum_rows.init(p.residual_out, group, first_column);
    for (int i = 0; i < config.rings * config.stages; ++i) hopper::init(full[i], 1);
    shared.init();
    hopper::fence_barrier_init();
  }
  if (cluster > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }
  if (loads) ring.load_first();

  const auto load_weight = [&](int v, float (&w)[kVector]) {
    with_type<T>(p.weight.type, [&](auto zero) {
      at.template load_parameter<decltype(zero)>(weight_row.data, v, w);
    });
#pragma unroll
    for (int e = 0; e < kVector; ++e) w[e] += p.weight_offset;
  };
  const auto load_bias = [&](int v, float (&b)[kVector]) {
    with_type<T>(p.bias.type, [&](auto zero) {
      at.template load_parameter<decltype(zero)>(bias_row.data, v, b);
    });
  };
  float weight[kHoldsParameters ? kVectors : 1][kVector];
  float bias[kHoldsParameters ? kVectors : 1][kVector];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kHoldsParameters) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) weight[v][e] = 1.0f, bias[v][e] = 0.0f;
      if (p.weight.data && at.has(v)) load_weight(v, weight[v]);
      if (p.bias.data && at.has(v)) load_bias(v, bias[v]);
    } else if (at.has(v)) {
      // Read for each row, first when its sums are known: by then they have come.
      if (p.weight.data) at.prefetch(weight_row.data, v, p.weight.type);
      if (p.bias.data) at.prefetch(bias_row.data, v, p.bias.type);
    }
  }

  const float columns = static_cast<float>(m.columns), per_column = 1.0f / columns;
  const float warp_columns =
      p.layer && !warp_rows ? sum_lanes(static_cast<float>(at.owned()), 32) : columns;
  const float per_warp_column = 1.0f / fmaxf(warp_columns, 1.0f);
  const int at_once = warp_rows ? 32 / lanes : 1;
  const int mine = warp_rows ? lane / lanes : 0;
  uint32_t turn = 0;

  while (ring.wait()) {
    const uint32_t first_row = ring.first_row();
    const int count = ring.rows_from(first_row);
    for (int i = 0; i < count; i += at_once) {
      const bool has_row = i + mine < count;
      const int in_stage = has_row ? i + mine : i;
      const uint32_t row = first_row + in_stage;
      const auto refill = [&] {
        if (loads && i + at_once >= count) ring.load_again(ring.slot, ring.block);
      };

      auto now = at.recomputed();
      float values[kVectors][kVector];
      const char* x = operands[0].template in_stage<kAligned>(ring.stage(), first_row, in_stage);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (now.has(v)) {
          now.template load<T>(x, v, values[v]);
        } else {
#pragma unroll
          for (int e = 0; e < kVector; ++e) values[v][e] = 0.0f;
        }
      }
      if (p.residual.data) {
        const char* residual =
            operands[1].template in_stage<kAligned>(ring.stage(), first_row, in_stage);
        with_type<T>(p.residual.type, [&](auto zero) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (!now.has(v)) continue;
            float added[kVector];
            now.template load<decltype(zero)>(residual, v, added);
#pragma unroll
            for (int e = 0; e < kVector; ++e) values[v][e] += added[e];
          }
        });
      }
      if (warp_rows) {
        __syncwarp();
        refill();
      }

      float mean = 0.0f;
      if (p.layer) {
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) sum += values[v][e];
        }
        mean = sum_lanes(sum, lanes) * per_warp_column;
      }
      float squares = 0.0f;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!now.has(v)) continue;
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const float away = values[v][e] - mean;
          if (now.has(v, e)) squares = fmaf(away, away, squares);
        }
      }
      squares = sum_lanes(squares, lanes);
      if (!warp_rows) {
        const float4 whole = exchange(shared, turn, cluster, {mean, squares, warp_columns, 0.0f},
                                      Moments{p.layer}, refill);
        mean = whole.x;
        squares = whole.y;
      }
      now = at.recomputed(has_row);
      const float rstd = rsqrtf(squares * per_column + p.eps);
      const int64_t of_row = int64_t{row} * groups + group;
      const bool tells = at.thread == 0 && rank == 0 && has_row;
      if (tells) {
        if (p.mean) p.mean[of_row] = mean;
        if (p.rstd) p.rstd[of_row] = rstd;
      }

      const auto store = [&](auto zero, const Target& to) {
        char* place = to.row(row);
        StoreState state{};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          now.template store<decltype(zero)>(place, v, values[v], state);
        }
      };
      if (p.residual_out.data) {
        with_type<T>(p.residual_out.type, [&](auto zero) { store(zero, sum_rows); });
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) values[v][e] = (values[v][e] - mean) * rstd;
        if constexpr (kHoldsParameters) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            values[v][e] = fmaf(values[v][e], weight[v][e], bias[v][e]);
          }
        }
      }
      if constexpr (!kHoldsParameters) {
        if (p.weight.data) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (!now.has(v)) continue;
            float w[kVector];
            load_weight(v, w);
#pragma unroll
            for (int e = 0; e < kVector; ++e) values[v][e] *= w[e];
          }
        }
        if (p.bias.data) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (!now.has(v)) continue;
            float b[kVector];
            load_bias(v, b);
#pragma unroll
            for (int e = 0; e < kVector; ++e) values[v][e] += b[e];
          }
        }
      }
      if (!p.quantizes()) {
        with_type<T>(p.y.type, [&](auto zero) { store(zero, y_rows); });
        continue;
      }

      float scale;
      if (p.row_scales) {
        float largest = 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            const float value = fabsf(values[v][e]);
            if (now.has(v) && now.has(v, e)) largest = max_or_nan(largest, value);
          }
        }
        largest = max_lanes(largest, lanes);
        if (!warp_rows) {
          largest =
              exchange(shared, turn, cluster, {largest, 0.0f, 0.0f, 0.0f}, Largest{}, [] {}).x;
        }
        scale = scale_of_row(largest);
        if (tells) p.row_scales[of_row] = scale;
      } else {
        scale = *p.scale;
      }
      const float per_scale = 1.0f / scale;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) values[v][e] *= per_scale;
      }
      store(E4m3{}, y_rows);
    }
    ring.advance();
  }
  if (cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
