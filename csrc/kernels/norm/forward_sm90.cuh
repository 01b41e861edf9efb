// y = norm(x [+ residual]) * (weight + weight_offset) + bias.
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
    return {mean, sum(fmaf(part.z * away, away, part.y)), count, 0.0f};
  }
};

template <class T, int kVectors, bool kAligned>
__global__ void __launch_bounds__(kVectors > 4 ? 256 : 512, 1)
    norm_forward_sm90(const __grid_constant__ NormForward p,
                      const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Exchange shared;
  __shared__ Staged operands[2];
  __shared__ hopper::Barrier full[kForwardRings * NormConfig::kMaxStages];
  __shared__ uint32_t drawn[NormConfig::kMaxStages];

  const NormMapping& m = config.mapping;
  const int cluster = m.cluster, lanes = m.lanes;
  const bool warp_rows = lanes <= 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = cluster > 1 ? static_cast<int>(hopper::cluster_cta_rank()) : 0;
  const int first_column = rank * static_cast<int>(m.cta_columns);

  Columns<kVectors, kVector, kAligned> at;
  at.thread = warp_rows ? lane & (lanes - 1) : threadIdx.x;
  at.lanes = lanes;
  at.vectors = m.thread_vectors;
  at.count = static_cast<int>(min(m.cta_columns, m.columns - first_column));

  Ring ring;
  const int ring_index = warp_rows ? warp : 0;
  ring.operands = operands;
  ring.operand_count = p.residual.data ? 2 : 1;
  ring.stage_bytes = config.stage_bytes;
  ring.stages = config.stages;
  ring.rows_per_stage = config.rows_per_stage;
  ring.bytes = shared_bytes + ring_index * config.stages * config.stage_bytes;
  ring.full = full + ring_index * config.stages;
  ring.drawn = drawn;
  ring.rows = static_cast<uint32_t>(p.rows);
  ring.blocks = (ring.rows + config.rows_per_stage - 1) / config.rows_per_stage;
  ring.owners = gridDim.x / cluster * config.rings;
  ring.ticket = config.by_ticket ? p.ticket : nullptr;
  ring.loads = warp_rows || warp == 0;

  if (threadIdx.x == 0) {
    const int end = operands[0].init(p.x, first_column, at.count, 0, config.rows_per_stage);
    operands[1].init(p.residual, first_column, at.count, end, config.rows_per_stage);
    for (int i = 0; i < config.rings * config.stages; ++i) hopper::init(full[i], 1);
    shared.init();
    hopper::fence_barrier_init();
  }
  if (cluster > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }
  ring.begin(blockIdx.x / cluster * config.rings + ring_index);

  const float columns = static_cast<float>(m.columns), per_column = 1.0f / columns;
  const float warp_columns =
      p.layer && !warp_rows ? sum_lanes(static_cast<float>(at.owned()), 32) : columns;
  const float per_warp_column = 1.0f / fmaxf(warp_columns, 1.0f);
  const int at_once = warp_rows ? 32 / lanes : 1;
  const int mine = warp_rows ? lane / lanes : 0;
  const int y_size = size_of(p.y.type), residual_size = size_of(p.residual_out.type);
  uint32_t turn = 0;

  while (ring.wait()) {
    const uint32_t first_row = ring.block * config.rows_per_stage;
    const int count =
        static_cast<int>(min(static_cast<uint32_t>(config.rows_per_stage), ring.rows - first_row));
    for (int i = 0; i < count; i += at_once) {
      const bool has_row = i + mine < count;
      const int in_stage = has_row ? i + mine : i;
      const uint32_t row = first_row + in_stage;
      const bool last = i + at_once >= count;
      const auto refill = [&] {
        if (last) ring.load_next(ring.slot);
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
        with_type(p.residual.type, [&](auto zero) {
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
      now = at.recomputed();
      const float rstd = rsqrtf(fmaf(squares, per_column, p.eps));
      if (at.thread == 0 && rank == 0 && has_row) {
        if (p.mean) p.mean[row] = mean;
        if (p.rstd) p.rstd[row] = rstd;
      }

      if (p.residual_out.data && has_row) {
        char* sum = static_cast<char*>(p.residual_out.data) +
                    (int64_t{row} * m.columns + first_column) * residual_size;
        with_type(p.residual_out.type, [&](auto zero) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (now.has(v)) now.template store<decltype(zero)>(sum, v, values[v]);
          }
        });
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) values[v][e] = __fmul_rn(values[v][e] - mean, rstd);
      }
      if (p.weight.data) {
        with_type(p.weight.type, [&](auto zero) {
          using W = decltype(zero);
          const char* weight = static_cast<const char*>(p.weight.data) + first_column * sizeof(W);
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (!now.has(v)) continue;
            float w[kVector];
            now.template load<W>(weight, v, w);
#pragma unroll
            for (int e = 0; e < kVector; ++e)
              values[v][e] = __fmul_rn(values[v][e], w[e] + p.weight_offset);
          }
        });
      }
      if (p.bias.data) {
        with_type(p.bias.type, [&](auto zero) {
          using B = decltype(zero);
          const char* bias = static_cast<const char*>(p.bias.data) + first_column * sizeof(B);
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (!now.has(v)) continue;
            float b[kVector];
            now.template load<B>(bias, v, b);
#pragma unroll
            for (int e = 0; e < kVector; ++e) values[v][e] += b[e];
          }
        });
      }
      if (has_row) {
        char* y = static_cast<char*>(p.y.data) + (int64_t{row} * m.columns + first_column) * y_size;
        with_type(p.y.type, [&](auto zero) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (now.has(v)) now.template store<decltype(zero)>(y, v, values[v]);
          }
        });
      }
    }
    ring.advance();
  }
  if (cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
