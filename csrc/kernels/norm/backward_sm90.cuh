// The gradients of a norm. With g = grad_y * (weight + weight_offset) and xhat = (x - mean) * rstd:
//   grad_x = (g - xhat * mean(g * xhat) [- mean(g): LayerNorm]) * rstd [+ grad_residual_out]
// and, summed over rows, grad_weight = grad_y * xhat and grad_bias = grad_y.
//
// (Products and sums as in the forward: explicitly fused or not.)
//
// x and grad_y are read from their stage twice, before and after the row's sums. Registers hold the
// sums over rows of grad_weight; those of grad_bias, which would cost a second CTA its registers,
// are in shared memory, a place for each column slot of each thread. The sums of a CTA or cluster
// are one row of partials, which a second kernel adds up.
#pragma once

#include "hopper/dependent_launch.cuh"
#include "hopper/memory_order.cuh"
#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

inline constexpr int kBackwardRings = 12;

// Of two rows: the sums of g * xhat and of g.
template <int kMost>
struct PairSums {
  bool layer, pair;

  __device__ float4 operator()(float4 part, int width, bool = false) const {
    part.x = sum_lanes<kMost>(part.x, width);
    if (layer) part.y = sum_lanes<kMost>(part.y, width);
    if (pair) part.z = sum_lanes<kMost>(part.z, width);
    if (pair && layer) part.w = sum_lanes<kMost>(part.w, width);
    return part;
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

// Rows within a warp: twelve warps an SM, or eight with registers for 9 vectors. Rows over warps:
// sixteen.
template <int kVectors, bool kInWarp>
inline constexpr int kBackwardThreads = norm_max_threads(NormPass::kBackward, kVectors, kInWarp);

template <class T, int kVectors, bool kInWarp, bool kFull>
__global__ void __launch_bounds__(kBackwardThreads<kVectors, kInWarp>, 1)
    norm_backward_sm90(const __grid_constant__ NormBackward p,
                       const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  // Registers hold the weight of short rows.
  constexpr bool kHoldsWeight = kInWarp ? kVectors <= 4 : kVectors <= 2;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Exchange shared;
  constexpr int kRings = kInWarp ? kBackwardRings : 1;
  __shared__ Staged operands[kRings][3];
  __shared__ hopper::Barrier full[kRings][NormConfig::kMaxStages];
  __shared__ uint32_t done[NormConfig::kMaxStages];  // of a CTA's ring: warps that are, in all

  const NormMapping& m = config.mapping;
  const int lane = threadIdx.x % 32, ring_index = kInWarp ? threadIdx.x / 32 : 0;
  const Place place = Place::of_cta<kInWarp>(config);
  const int lanes = kInWarp ? m.lanes : 32;  // of a warp that a row has
  const int mine = kInWarp ? lane >> (__ffs(lanes) - 1) : 0;
  using At = Columns<kVectors, kVector, kInWarp, kFull>;
  const At at = At::of_span(m, kInWarp ? lane & (lanes - 1) : static_cast<int>(threadIdx.x),
                            place.first_column);
  Ring<kInWarp, kFull> ring{
      config,
      static_cast<uint32_t>(p.rows),
      operands[ring_index],
      p.grad_residual_out.data ? 3 : 2,
      Staged::touches(p.x, at.count, config) && Staged::touches(p.grad_y, at.count, config) &&
          (!p.grad_residual_out.data || Staged::touches(p.grad_residual_out, at.count, config)),
      shared_bytes + ring_index * config.stages * config.stage_bytes,
      full[ring_index],
      nullptr,
      nullptr,
      place.team * config.rings + ring_index};
  const bool in_first_warp = kInWarp || threadIdx.x < 32;
  if (in_first_warp) {
    if (lane < config.stages) hopper::init(full[ring_index][lane], 1);
    if (!kInWarp && lane < config.stages) done[lane] = 0;
    if (lane == 0) {
      Staged* const staged = operands[ring_index];
      int end = staged[0].init(p.x, place, at.count, config, config.pitches[0], 0);
      end = staged[1].init(p.grad_y, place, at.count, config, config.pitches[1], end);
      staged[2].init(p.grad_residual_out, place, at.count, config, config.pitches[2], end);
      if constexpr (!kInWarp) shared.init();
    }
    hopper::fence_barrier_init();
    __syncwarp();
  }
  // Until here nothing was read that an earlier kernel may write.
  hopper::wait_for_previous_kernel();
  hopper::allow_next_kernel();
  if (kInWarp || threadIdx.x == 0) ring.load_first();
  if (place.cluster > 1) {
    hopper::cluster_sync();
  } else if (!kInWarp) {
    __syncthreads();
  }

  const Target weight(p.weight, place), grad_x(p.grad_x, place);
  const Target grad_residual(p.grad_residual, place);
  const auto load_weight = [&](const At& at, int v, float (&w)[kVector]) {
    if (p.weight.data) {
      with_type<T>(p.weight.type,
                   [&](auto zero) { at.template load<decltype(zero)>(weight.data, v, w); });
      if (p.weight_offset != 0.0f) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) w[e] += p.weight_offset;
      }
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) w[e] = 1.0f;
    }
  };
  float held_weight[kHoldsWeight ? kVectors : 1][kVector];
  float weight_sums[kVectors][kVector] = {};
  const Slots<kVector> bias_sums{reinterpret_cast<float4*>(shared_bytes + config.ring_bytes()),
                                 at.vectors};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!at.has(v)) continue;
    if constexpr (kHoldsWeight) load_weight(at, v, held_weight[v]);
    if (config.bias_sums) {
      const float zeros[kVector] = {};
      bias_sums.put(v, zeros);
    }
  }

  const bool layer = p.mean != nullptr;
  const float per_column = 1.0f / static_cast<float>(m.columns);
  const int at_once = config.at_once;  // a CTA's 2 or 1
  uint32_t turn = 0;

  // The statistics of a turn's row, or of a CTA's two, are loaded one turn ahead.
  constexpr int kTurnRows = kInWarp ? 1 : 2;
  float next_mean[kTurnRows] = {}, next_rstd[kTurnRows] = {};
  const auto load_statistics = [&](uint32_t row) {
#pragma unroll
    for (int r = 0; r < kTurnRows; ++r) {
      if (r >= at_once || row + r >= ring.rows) continue;
      const int64_t of_row = int64_t{row + r} * config.groups + place.group;
      next_rstd[r] = p.rstd[of_row];
      if (layer) next_mean[r] = p.mean[of_row];
    }
  };
  load_statistics(ring.first_row() + mine);

  while (ring.wait()) {
    const uint32_t first_row = ring.first_row();
    const int count = ring.rows_from(first_row);
#pragma unroll 1
    for (int i = 0; i < count; i += at_once) {
      const bool has_row = !kInWarp || i + mine < count;
      const int in_stage = has_row ? i + mine : i;
      const int turn_rows = kInWarp ? 1 : count;
      float mean[kTurnRows], rstd[kTurnRows];
#pragma unroll
      for (int r = 0; r < kTurnRows; ++r) mean[r] = next_mean[r], rstd[r] = next_rstd[r];
      load_statistics(i + at_once < count
                          ? first_row + i + at_once + mine
                          : first_row + config.owners * config.rows_per_stage + mine);

      // Row r of the turn.
      struct InStage {
        const char *x, *grad;
        float rstd, shift;  // xhat = x * rstd + shift
      };
      const auto row_of = [&](int r) -> InStage {
        const Staged* const staged = operands[ring_index];
        const float row_rstd = r == 0 ? rstd[0] : rstd[kTurnRows - 1];
        return {staged[0].template in_stage<kFull>(ring.stage(), first_row, in_stage + r),
                staged[1].template in_stage<kFull>(ring.stage(), first_row, in_stage + r), row_rstd,
                -(r == 0 ? mean[0] : mean[kTurnRows - 1]) * row_rstd};
      };
      // x and grad_y, which becomes g.
      const auto load = [&](const At& now, const InStage& row, int v, float (&x)[kVector],
                            float (&grad)[kVector]) {
        now.template load<T>(row.x, v, x);
        with_type<T>(p.grad_y.type,
                     [&](auto zero) { now.template load<decltype(zero)>(row.grad, v, grad); });
      };
      const auto weigh = [&](const At& now, int v, float (&grad)[kVector]) {
        if constexpr (kHoldsWeight) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) grad[e] = __fmul_rn(grad[e], held_weight[v][e]);
        } else if (p.weight.data) {
          float w[kVector];
          load_weight(now, v, w);
#pragma unroll
          for (int e = 0; e < kVector; ++e) grad[e] = __fmul_rn(grad[e], w[e]);
        }
      };

      float4 sums{0.0f, 0.0f, 0.0f, 0.0f};  // as in PairSums
#pragma unroll 1
      for (int r = 0; r < turn_rows; ++r) {
        const At now = at.recomputed();
        const InStage row = row_of(r);
        float along = 0.0f, sum = 0.0f;
        if (has_row) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (!now.has(v)) continue;
            float xhat[kVector], grad[kVector];
            load(now, row, v, xhat, grad);
            if (config.bias_sums) bias_sums.add(v, grad);
#pragma unroll
            for (int e = 0; e < kVector; ++e) {
              xhat[e] = fmaf(xhat[e], row.rstd, row.shift);
              weight_sums[v][e] = fmaf(grad[e], xhat[e], weight_sums[v][e]);
            }
            weigh(now, v, grad);
#pragma unroll
            for (int e = 0; e < kVector; ++e) {
              along = fmaf(grad[e], xhat[e], along);
              sum += grad[e];
            }
          }
        }
        if (r == 0) {
          sums.x = along, sums.y = sum;
        } else {
          sums.z = along, sums.w = sum;
        }
      }
      // Else the compiler would keep what it has loaded, in registers that there aren't.
      if constexpr (kVectors > 1) asm volatile("" ::: "memory");
      const bool pair = !kInWarp && turn_rows > 1;
      sums = PairSums<32>{layer, pair}(sums, lanes);
      if constexpr (!kInWarp) {
        sums = exchange(shared, turn, place.cluster, sums, PairSums<kMaxWarps>{layer, pair}, [] {});
      }

#pragma unroll 1
      for (int r = 0; r < turn_rows; ++r) {
        const At now = at.recomputed();
        if (kFull && !has_row) continue;
        const InStage row = row_of(r);
        const uint32_t number = first_row + in_stage + r;
        // grad_x = g * rstd + x * slope + offset
        const float along = (r == 0 ? sums.x : sums.z) * per_column;
        const float sum = layer ? (r == 0 ? sums.y : sums.w) * per_column : 0.0f;
        const float slope = -along * row.rstd * row.rstd;
        const float offset = -fmaf(along, row.shift, sum) * row.rstd;
        StoreState x_state{}, residual_state{};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (!now.has(v)) continue;
          float x[kVector], grad[kVector];
          load(now, row, v, x, grad);
          weigh(now, v, grad);
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            grad[e] = fmaf(x[e], slope, fmaf(grad[e], row.rstd, offset));
          }
          if (p.grad_residual_out.data) {
            with_type<T>(p.grad_residual_out.type, [&](auto zero) {
              float added[kVector];
              now.template load<decltype(zero)>(operands[ring_index][2].template in_stage<kFull>(
                                                    ring.stage(), first_row, in_stage + r),
                                                v, added);
#pragma unroll
              for (int e = 0; e < kVector; ++e) grad[e] += added[e];
            });
          }
          const auto store = [&](ElementType type, const Target& to, StoreState& state) {
            with_type<T>(type, [&](auto zero) {
              now.template store<decltype(zero)>(to.row(number), v, grad, has_row, state);
            });
          };
          if (p.grad_x.data) store(p.grad_x.type, grad_x, x_state);
          if (p.grad_residual.data) store(p.grad_residual.type, grad_residual, residual_state);
        }
      }
    }
    __syncwarp();
    if constexpr (kInWarp) {
      ring.load_again(ring.slot, ring.block);
    } else if (lane == 0) {
      // The last warp to have done with the stage fills it again.
      const uint32_t before = hopper::add_acq_rel_cta(&done[ring.slot], 1);
      if ((before + 1) % m.warps == 0) ring.load_again(ring.slot, ring.block);
    }
    ring.advance();
  }

  if (p.weight_partials || config.bias_sums) {
    const int64_t partial =
        (int64_t{place.team} * config.groups + place.group) * m.columns + place.first_column;
    if constexpr (kInWarp) {
      __syncthreads();  // all stages are read
      const Slots<kVector> slots{reinterpret_cast<float4*>(shared_bytes), at.vectors};
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (at.has(v)) slots.put(v, weight_sums[v]);
      }
      __syncthreads();
      for (int column = threadIdx.x; column < at.count; column += blockDim.x) {
        if (p.weight_partials) {
          p.weight_partials[partial + column] = slots.sum_of_column(column, m.lanes);
        }
        if (config.bias_sums) {
          p.bias_partials[partial + column] = bias_sums.sum_of_column(column, m.lanes);
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
          if (at.may_lack(v) && at.first(v) + e >= at.count) continue;
          if (p.weight_partials) p.weight_partials[partial + at.first(v) + e] = weight_sums[v][e];
          if (config.bias_sums) p.bias_partials[partial + at.first(v) + e] = bias[e];
        }
      }
    }
  }
  if (place.cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
