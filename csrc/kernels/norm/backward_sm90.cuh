// The gradients of a norm. With g = grad_y * (weight + weight_offset) and xhat = (x - mean) * rstd:
//   grad_x = (g - xhat * mean(g * xhat) [- mean(g): LayerNorm]) * rstd [+ grad_residual_out]
// and, summed over rows, grad_weight = grad_y * xhat and grad_bias = grad_y.
//
// Where the compiler might join a product with a sum, in one kernel and not in another, it is told
// which: all kernels give a row the same bits. So does the forward.
//
// x and grad_y are read from their stage twice, before and after the row's sums: registers hold the
// sums over rows. Those of a CTA or cluster are one row of partials, which a second kernel adds up.
#pragma once

#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

inline constexpr int kBackwardRings = 12;

struct PairSum {
  __device__ float4 operator()(float4 part) const {
    return {sum_lanes(part.x, kMaxWarps), sum_lanes(part.y, kMaxWarps), 0.0f, 0.0f};
  }
};

// The sums over rows of a thread's columns, added up over the warps of a CTA that have rows of
// their own, and stored. `scratch` has a float a warp and column; all loads into it have landed.
template <int kVectors, int kVector, bool kAligned>
__device__ inline void store_partials(float (&sums)[kVectors][kVector], float* partials,
                                      float* scratch,
                                      const Columns<kVectors, kVector, kAligned>& at,
                                      bool warp_rows) {
  if (!warp_rows) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        if (at.has(v) && at.has(v, e)) partials[at.first(v) + e] = sums[v][e];
      }
    }
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int offset = at.lanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        sums[v][e] += __shfl_xor_sync(0xffffffffu, sums[v][e], offset);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      if (lane < at.lanes && at.has(v) && at.has(v, e)) {
        scratch[warp * at.count + at.first(v) + e] = sums[v][e];
      }
    }
  }
  __syncthreads();
  for (int column = threadIdx.x; column < at.count; column += blockDim.x) {
    float sum = 0.0f;
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
      sum += scratch[w * at.count + column];
    }
    partials[column] = sum;
  }
  __syncthreads();
}

// The most warps a CTA has. Two sums a column are more than 128 registers hold.
template <int kVectors, bool kBias>
inline constexpr int kBackwardThreads = kVectors > 4            ? 256
                                        : kVectors > 1 && kBias ? 384
                                                                : 512;

// kBias: whether grad_bias is wanted.
template <class T, int kVectors, bool kAligned, bool kBias>
__global__ void __launch_bounds__(kBackwardThreads<kVectors, kBias>, 1)
    norm_backward_sm90(const __grid_constant__ NormBackward p,
                       const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Exchange shared;
  __shared__ Staged operands[3];
  __shared__ hopper::Barrier full[kBackwardRings * NormConfig::kMaxStages];

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
  ring.operand_count = p.grad_residual_out.data ? 3 : 2;
  ring.stage_bytes = config.stage_bytes;
  ring.stages = config.stages;
  ring.rows_per_stage = config.rows_per_stage;
  ring.bytes = shared_bytes + ring_index * config.stages * config.stage_bytes;
  ring.full = full + ring_index * config.stages;
  ring.rows = static_cast<uint32_t>(p.rows);
  ring.blocks = (ring.rows + config.rows_per_stage - 1) / config.rows_per_stage;
  ring.owners = gridDim.x / cluster * config.rings;
  ring.ticket = nullptr;
  ring.loads = warp_rows || warp == 0;

  if (threadIdx.x == 0) {
    int end = operands[0].init(p.x, first_column, at.count, 0, config.rows_per_stage);
    end = operands[1].init(p.grad_y, first_column, at.count, end, config.rows_per_stage);
    operands[2].init(p.grad_residual_out, first_column, at.count, end, config.rows_per_stage);
    for (int i = 0; i < config.rings * config.stages; ++i) hopper::init(full[i], 1);
    shared.init();
    hopper::fence_barrier_init();
  }
  if (cluster > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }
  const uint32_t owner = blockIdx.x / cluster * config.rings + ring_index;
  ring.begin(owner);

  float weight_sums[kVectors][kVector] = {};
  float bias_sums[kBias ? kVectors : 1][kVector] = {};
  const float per_column = 1.0f / static_cast<float>(m.columns);
  const int at_once = warp_rows ? 32 / lanes : 1;
  const int mine = warp_rows ? lane / lanes : 0;
  uint32_t turn = 0;

  // A row's statistics are loaded one turn ahead.
  float next_mean = 0.0f, next_rstd = 0.0f;
  const auto load_statistics = [&](uint32_t row) {
    if (row >= ring.rows) return;
    next_rstd = p.rstd[row];
    if (p.mean) next_mean = p.mean[row];
  };
  load_statistics(owner * config.rows_per_stage + mine);

  while (ring.wait()) {
    const uint32_t first_row = ring.block * config.rows_per_stage;
    const int count =
        static_cast<int>(min(static_cast<uint32_t>(config.rows_per_stage), ring.rows - first_row));
    for (int i = 0; i < count; i += at_once) {
      const bool has_row = i + mine < count;
      const int in_stage = has_row ? i + mine : i;
      const uint32_t row = first_row + in_stage;
      const float mean = next_mean, rstd = next_rstd;
      load_statistics(i + at_once < count
                          ? first_row + i + at_once + mine
                          : (ring.block + ring.owners) * config.rows_per_stage + mine);
      const char* x_row =
          operands[0].template in_stage<kAligned>(ring.stage(), first_row, in_stage);
      const char* grad_row =
          operands[1].template in_stage<kAligned>(ring.stage(), first_row, in_stage);

      auto now = at.recomputed();
      // xhat, and grad_y with the weight.
      const auto load = [&](int v, float (&xhat)[kVector], float (&grad)[kVector]) {
        now.template load<T>(x_row, v, xhat);
#pragma unroll
        for (int e = 0; e < kVector; ++e) xhat[e] = (xhat[e] - mean) * rstd;
        now.load(p.grad_y.type, grad_row, v, grad);
      };
      const auto load_weight = [&](int v, float (&w)[kVector]) {
        if (p.weight.data) {
          now.load(p.weight.type,
                   static_cast<const char*>(p.weight.data) + first_column * size_of(p.weight.type),
                   v, w);
#pragma unroll
          for (int e = 0; e < kVector; ++e) w[e] += p.weight_offset;
        } else {
#pragma unroll
          for (int e = 0; e < kVector; ++e) w[e] = 1.0f;
        }
      };

      float along = 0.0f, sum = 0.0f;  // of g * xhat and of g
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!now.has(v)) continue;
        float xhat[kVector], grad[kVector], w[kVector];
        load(v, xhat, grad);
        load_weight(v, w);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          if (!now.has(v, e)) continue;
          if (has_row) {
            weight_sums[v][e] = fmaf(grad[e], xhat[e], weight_sums[v][e]);
            if constexpr (kBias) bias_sums[v][e] += grad[e];
          }
          const float g = __fmul_rn(grad[e], w[e]);
          along = fmaf(g, xhat[e], along);
          sum = __fadd_rn(sum, g);
        }
      }
      // Else the compiler would keep what it has loaded, in registers that there aren't.
      if constexpr (kVectors > 1) asm volatile("" ::: "memory");
      along = sum_lanes(along, lanes);
      sum = sum_lanes(sum, lanes);
      if (!warp_rows) {
        const float4 whole =
            exchange(shared, turn, cluster, {along, sum, 0.0f, 0.0f}, PairSum{}, [&] {
              // All warps have done with the stage of the row before.
              if (turn > 1) ring.load_next(ring.slot == 0 ? config.stages - 1 : ring.slot - 1);
            });
        along = whole.x;
        sum = whole.y;
      }
      along *= per_column;
      sum = p.mean ? sum * per_column : 0.0f;

      now = at.recomputed();
      const int64_t element = int64_t{row} * m.columns + first_column;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!now.has(v) || !has_row) continue;
        float xhat[kVector], grad[kVector], w[kVector];
        load(v, xhat, grad);
        load_weight(v, w);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const float across = fmaf(-xhat[e], along, __fmul_rn(grad[e], w[e])) - sum;
          grad[e] = __fmul_rn(across, rstd);
        }
        if (p.grad_residual_out.data) {
          float added[kVector];
          now.load(p.grad_residual_out.type,
                   operands[2].template in_stage<kAligned>(ring.stage(), first_row, in_stage), v,
                   added);
#pragma unroll
          for (int e = 0; e < kVector; ++e) grad[e] += added[e];
        }
        if (p.grad_x.data) {
          now.store(p.grad_x.type,
                    static_cast<char*>(p.grad_x.data) + element * size_of(p.grad_x.type), v, grad);
        }
        if (p.grad_residual.data) {
          now.store(
              p.grad_residual.type,
              static_cast<char*>(p.grad_residual.data) + element * size_of(p.grad_residual.type), v,
              grad);
        }
      }
    }
    if (warp_rows) {
      __syncwarp();
      ring.load_next(ring.slot);
    }
    ring.advance();
  }

  const int64_t partial = blockIdx.x / cluster * m.columns + first_column;
  float* scratch = reinterpret_cast<float*>(shared_bytes);
  if (p.weight_partials || p.bias_partials) __syncthreads();  // all stages are read
  if (p.weight_partials) {
    store_partials(weight_sums, p.weight_partials + partial, scratch, at, warp_rows);
  }
  if constexpr (kBias) {
    if (p.bias_partials) {
      store_partials(bias_sums, p.bias_partials + partial, scratch, at, warp_rows);
    }
  }
  if (cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
