// The gradients of a norm. With g = grad_y * (weight + weight_offset) and xhat = (x - mean) * rstd:
//   grad_x = (g - xhat * mean(g * xhat) [- mean(g): LayerNorm]) * rstd [+ grad_residual_out]
// and, summed over rows, grad_weight = grad_y * xhat and grad_bias = grad_y.
//
// x and grad_y are read from their stage twice, before and after the row's sums. Registers hold the
// sums over rows of grad_weight; those of grad_bias, which would cost a second CTA its registers,
// are in shared memory, a place for each column slot of each thread. The sums of a CTA or cluster
// are one row of partials, which a second kernel adds up.
#pragma once

#include "hopper/memory_order.cuh"
#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

inline constexpr int kBackwardRings = 12;

// Of two rows: the sums of g * xhat and of g.
struct PairSums {
  __device__ float4 operator()(float4 part) const {
    const auto sum = [](float value) { return sum_lanes(value, kMaxWarps); };
    return {sum(part.x), sum(part.y), sum(part.z), sum(part.w)};
  }
};

// A float for each column slot of each thread in shared memory, four at a time. A warp's accesses
// lie side by side.
template <int kVector>
struct Slots {
  static constexpr int kQuads = kVector / 4;
  float4* base;
  int vectors;  // a thread

  __device__ float4& quad(int warp, int lane, int v, int q) const {
    return base[((warp * vectors + v) * kQuads + q) * 32 + lane];
  }
  // This thread's.
  __device__ void add(int v, const float (&values)[kVector]) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      float4& sum = quad(threadIdx.x / 32, threadIdx.x % 32, v, q);
      float4 now = sum;
      now.x += values[4 * q], now.y += values[4 * q + 1];
      now.z += values[4 * q + 2], now.w += values[4 * q + 3];
      sum = now;
    }
  }
  __device__ void put(int v, const float (&values)[kVector]) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      quad(threadIdx.x / 32, threadIdx.x % 32, v, q) =
          float4{values[4 * q], values[4 * q + 1], values[4 * q + 2], values[4 * q + 3]};
    }
  }
  __device__ void get(int v, float (&values)[kVector]) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float4 now = quad(threadIdx.x / 32, threadIdx.x % 32, v, q);
      values[4 * q] = now.x, values[4 * q + 1] = now.y;
      values[4 * q + 2] = now.z, values[4 * q + 3] = now.w;
    }
  }
  // Of rows within a warp, `lanes` threads each: the sum of a column over all rows of all warps.
  __device__ float sum_of_column(int column, int lanes) const {
    const int v = column / (lanes * kVector), thread = column / kVector % lanes;
    const int e = column % kVector;
    float sum = 0.0f;
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
      for (int lane = thread; lane < 32; lane += lanes) {
        sum += reinterpret_cast<const float*>(&quad(w, lane, v, e / 4))[e % 4];
      }
    }
    return sum;
  }
};

template <class T, int kVectors, bool kAligned>
__global__ void __launch_bounds__(kVectors > 4 ? 256 : 512, 1)
    norm_backward_sm90(const __grid_constant__ NormBackward p,
                       const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  // Short rows leave registers to hold the weight. With long ones there are none for more than one
  // vector at a time: the compiler doesn't move loads over a __syncwarp().
  constexpr bool kHoldsWeight = kVectors <= 2, kOneByOne = kVectors > 4 || !kAligned;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Exchange shared;
  __shared__ Staged operands[3];
  __shared__ Target weight_row, x_rows, residual_rows;
  __shared__ hopper::Barrier full[kBackwardRings * NormConfig::kMaxStages];
  __shared__ uint32_t done[NormConfig::kMaxStages];  // of a CTA's ring: warps that are, mod all

  const NormMapping& m = config.mapping;
  const int cluster = m.cluster, lanes = m.lanes, groups = config.groups;
  const bool warp_rows = lanes <= 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = cluster > 1 ? static_cast<int>(hopper::cluster_cta_rank()) : 0;
  const int team = blockIdx.x / cluster, group = groups > 1 ? team % groups : 0;
  const int64_t first_column = rank * m.cta_columns;
  using At = Columns<kVectors, kVector, kAligned>;
  const At at{lanes, m.thread_vectors,
              warp_rows ? lane & (lanes - 1) : static_cast<int>(threadIdx.x),
              static_cast<int>(min(m.cta_columns, m.columns - first_column))};

  const int ring_index = warp_rows ? warp : 0;
  Ring ring{config,
            static_cast<uint32_t>(p.rows),
            operands,
            p.grad_residual_out.data ? 3 : 2,
            shared_bytes + ring_index * config.stages * config.stage_bytes,
            full + ring_index * config.stages,
            nullptr,
            nullptr,
            static_cast<uint32_t>(team / groups * config.rings + ring_index)};

  if (threadIdx.x == 0) {
    int end = operands[0].init(p.x, group, first_column, at.count, 0, config.rows_per_stage);
    end = operands[1].init(p.grad_y, group, first_column, at.count, end, config.rows_per_stage);
    operands[2].init(p.grad_residual_out, group, first_column, at.count, end,
                     config.rows_per_stage);
    weight_row.init(p.weight, group, first_column);
    x_rows.init(p.grad_x, group, first_column);
    residual_rows.init(p.grad_residual, group, first_column);
    for (int i = 0; i < config.rings * config.stages; ++i) hopper::init(full[i], 1);
    for (uint32_t& warps_done : done) warps_done = 0;
    shared.init();
    hopper::fence_barrier_init();
  }
  if (cluster > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }
  if (warp_rows || warp == 0) ring.load_first();

  const auto load_weight = [&](int v, float (&w)[kVector]) {
    if (p.weight.data) {
      with_type<T>(p.weight.type, [&](auto zero) {
        at.template load_parameter<decltype(zero)>(weight_row.data, v, w);
      });
#pragma unroll
      for (int e = 0; e < kVector; ++e) w[e] += p.weight_offset;
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) w[e] = 1.0f;
    }
  };
  float weight[kHoldsWeight ? kVectors : 1][kVector];
  float weight_sums[kVectors][kVector] = {};
  const Slots<kVector> bias_sums{reinterpret_cast<float4*>(shared_bytes + config.ring_bytes()),
                                 m.thread_vectors};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kHoldsWeight) {
      if (at.has(v)) load_weight(v, weight[v]);
    } else if (p.weight.data && at.has(v)) {
      at.prefetch(weight_row.data, v, p.weight.type);
    }
    if (config.bias_sums && v < at.vectors) {
      const float zeros[kVector] = {};
      bias_sums.put(v, zeros);
    }
  }

  const float per_column = 1.0f / static_cast<float>(m.columns);
  const int at_once = warp_rows ? 32 / lanes : min(2, config.rows_per_stage);
  const int mine = warp_rows ? lane / lanes : 0;
  uint32_t turn = 0;

  // The statistics of a turn's row, or of a CTA's two, are loaded one turn ahead.
  float next_mean[2] = {}, next_rstd[2] = {};
  const auto load_statistics = [&](uint32_t row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + r >= ring.rows || r >= (warp_rows ? 1 : at_once)) continue;
      const int64_t of_row = int64_t{row + r} * groups + group;
      next_rstd[r] = p.rstd[of_row];
      if (p.mean) next_mean[r] = p.mean[of_row];
    }
  };
  load_statistics(ring.first_row() + mine);

  while (ring.wait()) {
    const uint32_t first_row = ring.first_row();
    const int count = ring.rows_from(first_row);
#pragma unroll 1
    for (int i = 0; i < count; i += at_once) {
      const bool has_row = i + mine < count;
      const int turn_rows = warp_rows ? 1 : min(at_once, count - i);
      const float mean[2] = {next_mean[0], next_mean[1]};
      const float rstd[2] = {next_rstd[0], next_rstd[1]};
      load_statistics(i + at_once < count
                          ? first_row + i + at_once + mine
                          : first_row + config.owners * config.rows_per_stage + mine);

      // Of row r of the turn: xhat, grad_y and the weight.
      const auto load = [&](const At& now, int r, int v, float (&xhat)[kVector],
                            float (&grad)[kVector], float (&w)[kVector]) {
        const int in_stage = i + mine + r;
        const float row_mean = r == 0 ? mean[0] : mean[1];
        const float row_rstd = r == 0 ? rstd[0] : rstd[1];
        now.template load<T>(
            operands[0].template in_stage<kAligned>(ring.stage(), first_row, in_stage), v, xhat);
#pragma unroll
        for (int e = 0; e < kVector; ++e) xhat[e] = (xhat[e] - row_mean) * row_rstd;
        with_type<T>(p.grad_y.type, [&](auto zero) {
          now.template load<decltype(zero)>(
              operands[1].template in_stage<kAligned>(ring.stage(), first_row, in_stage), v, grad);
        });
        if constexpr (kHoldsWeight) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) w[e] = weight[v][e];
        } else {
          load_weight(v, w);
        }
      };

      float4 sums{0.0f, 0.0f, 0.0f, 0.0f};  // as in PairSums
#pragma unroll 1
      for (int r = 0; r < turn_rows; ++r) {
        const At now = at.recomputed(has_row);
        float along = 0.0f, sum = 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (now.has(v)) {
            float xhat[kVector], grad[kVector], w[kVector];
            load(now, r, v, xhat, grad, w);
            if (config.bias_sums) bias_sums.add(v, grad);
#pragma unroll
            for (int e = 0; e < kVector; ++e) {
              if (!now.has(v, e)) continue;
              weight_sums[v][e] = fmaf(grad[e], xhat[e], weight_sums[v][e]);
              const float g = grad[e] * w[e];
              along = fmaf(g, xhat[e], along);
              sum += g;
            }
          }
          if constexpr (kOneByOne) __syncwarp();
        }
        if (r == 0) {
          sums.x = along, sums.y = sum;
        } else {
          sums.z = along, sums.w = sum;
        }
      }
      // Else the compiler would keep what it has loaded, in registers that there aren't.
      if constexpr (kVectors > 1) asm volatile("" ::: "memory");
      sums.x = sum_lanes(sums.x, lanes);
      if (p.mean) sums.y = sum_lanes(sums.y, lanes);
      if (!warp_rows) {
        if (turn_rows > 1) {
          sums.z = sum_lanes(sums.z, lanes);
          if (p.mean) sums.w = sum_lanes(sums.w, lanes);
        }
        sums = exchange(shared, turn, cluster, sums, PairSums{}, [] {});
      }

#pragma unroll 1
      for (int r = 0; r < turn_rows; ++r) {
        const At now = at.recomputed(has_row);
        const float along = (r == 0 ? sums.x : sums.z) * per_column;
        const float sum = p.mean ? (r == 0 ? sums.y : sums.w) * per_column : 0.0f;
        const float row_rstd = r == 0 ? rstd[0] : rstd[1];
        const uint32_t row = first_row + i + mine + r;
        StoreState x_state{}, residual_state{};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          float xhat[kVector], grad[kVector] = {}, w[kVector];
          if (now.has(v)) {
            load(now, r, v, xhat, grad, w);
#pragma unroll
            for (int e = 0; e < kVector; ++e) {
              grad[e] = (grad[e] * w[e] - xhat[e] * along - sum) * row_rstd;
            }
            if (p.grad_residual_out.data) {
              with_type<T>(p.grad_residual_out.type, [&](auto zero) {
                float added[kVector];
                now.template load<decltype(zero)>(
                    operands[2].template in_stage<kAligned>(ring.stage(), first_row, i + mine + r),
                    v, added);
#pragma unroll
                for (int e = 0; e < kVector; ++e) grad[e] += added[e];
              });
            }
          }
          const auto store = [&](ElementType type, const Target& to, StoreState& state) {
            with_type<T>(type, [&](auto zero) {
              now.template store<decltype(zero)>(to.row(row), v, grad, state);
            });
          };
          if (p.grad_x.data) store(p.grad_x.type, x_rows, x_state);
          if (p.grad_residual.data) store(p.grad_residual.type, residual_rows, residual_state);
          if constexpr (kOneByOne) __syncwarp();
        }
      }
    }
    __syncwarp();
    if (warp_rows) {
      ring.load_again(ring.slot, ring.block);
    } else {
      // The last warp to have done with the stage fills it again.
      uint32_t before = 0;
      if (lane == 0) before = hopper::add_acq_rel_cta(&done[ring.slot], 1);
      if ((__shfl_sync(0xffffffffu, before, 0) + 1) % m.warps == 0) {
        ring.load_again(ring.slot, ring.block);
      }
    }
    ring.advance();
  }

  if (p.weight_partials || config.bias_sums) {
    const int64_t partial = (int64_t{team / groups} * groups + group) * m.columns + first_column;
    if (warp_rows) {
      __syncthreads();  // all stages are read
      const Slots<kVector> slots{reinterpret_cast<float4*>(shared_bytes), m.thread_vectors};
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (v < at.vectors) slots.put(v, weight_sums[v]);
      }
      __syncthreads();
      for (int column = threadIdx.x; column < at.count; column += blockDim.x) {
        if (p.weight_partials) {
          p.weight_partials[partial + column] = slots.sum_of_column(column, lanes);
        }
        if (config.bias_sums) {
          p.bias_partials[partial + column] = bias_sums.sum_of_column(column, lanes);
        }
      }
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!at.has(v)) continue;
        float bias[kVector];
        if (config.bias_sums) bias_sums.get(v, bias);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          if (!at.has(v, e)) continue;
          if (p.weight_partials) p.weight_partials[partial + at.first(v) + e] = weight_sums[v][e];
          if (config.bias_sums) p.bias_partials[partial + at.first(v) + e] = bias[e];
        }
      }
    }
  }
  if (cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
