// y = norm(x [+ residual]) * (weight + weight_offset) + bias, in x's own or another type or, with a
// scale, in e4m3.
//
// Products are added by explicit fmaf(), or kept from that by __fmul_rn(): the compiler's choice
// could differ from kernel to kernel, and so a row's bits.
//
// A thread holds its columns of a row in fp32 registers, so the variance takes its two passes
// there. Over several warps and CTAs the parts' means and squared deviations are merged, in one
// exchange. Rows come through a ring in shared memory or, where they are few, directly.
//
// Weight and bias are on their way to shared memory while the first rows are, and stay there: each
// thread has its own columns' in a place of its own. Loaded for each row they cost a third of the
// time, and for the first row a trip to memory each, after that for x.
#pragma once

#include "hopper/async_copy.cuh"
#include "hopper/dependent_launch.cuh"
#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

inline constexpr int kForwardRings = 8;

// Of columns: their sum, the sum of squared deviations from their mean, how many, and the mean. An
// RMSNorm has the sum of squares in place of the second; and the largest |x * weight| in place of
// the first, where `largest`.
struct Moments {
  bool layer, largest;
  float per_cta_column, per_column;

  __device__ float4 operator()(float4 part, int width, bool all) const {
    if (!layer) {
      if (largest) part.x = max_lanes<kMaxWarps>(part.x, width);
      return {part.x, sum_lanes<kMaxWarps>(part.y, width), 0.0f, 0.0f};
    }
    const float2 both = sum_lanes<kMaxWarps>(float2{part.x, part.z}, width);
    const float sum = both.x, count = both.y;
    const float mean = __fmul_rn(sum, all ? per_column : per_cta_column), away = part.w - mean;
    return {sum, sum_lanes<kMaxWarps>(fmaf(part.z * away, away, part.y), width), count, mean};
  }
};

// Whether a row's largest result, of rows over warps, is known with its sums: that of x * weight,
// times rstd. Else it takes an exchange of its own.
__device__ inline bool scales_early(const NormForward& p) {
  return p.row_scales && !p.layer && p.bias.data == nullptr;
}

struct Largest {
  __device__ float4 operator()(float4 part, int width, bool) const {
    return {max_lanes<kMaxWarps>(part.x, width), 0.0f, 0.0f, 0.0f};
  }
};

// Sixteen warps an SM, or eight with registers for 9 vectors.
template <int kVectors, bool kInWarp>
inline constexpr int kForwardThreads = norm_max_threads(NormPass::kForward, kVectors, kInWarp);
template <int kVectors, bool kInWarp>
inline constexpr int kForwardCtas = kVectors > 5 || !kInWarp ? 1 : 2;

// A vector of a parameter for each of a thread's, in x's type, in shared memory. `which` of the
// two.
template <class T>
struct KeptVectors {
  static constexpr int kVector = 16 / sizeof(T);
  char* place;

  __device__ KeptVectors(char* base, int which, int vectors)
      : place(base + (threadIdx.x / 32 * 2 + which) * vectors * 512 + threadIdx.x % 32 * 16) {}
  // Complete after hopper::wait_for_copies().
  __device__ void copy(int v, const char* from) const {
    hopper::copy_async_16(place + v * 512, from);
  }
  __device__ void fill(int v, float value) const {
    float values[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) values[e] = value;
    const Words<4> words = pack_words<T>(values);
    *reinterpret_cast<uint4*>(place + v * 512) =
        uint4{words.word[0], words.word[1], words.word[2], words.word[3]};
  }
  __device__ void get(int v, float (&values)[kVector]) const {
    unpack_words<T>(load_words<4>(place + v * 512), values);
  }
};

// Four sums side by side: one would wait for each addition.
template <int kVectors, int kVector, class Add>
__device__ inline float sum_of_elements(const float (&values)[kVectors][kVector], const Add& add) {
  float sums[4] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) sums[e % 4] = add(values[v][e], sums[e % 4]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

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

  // Kept are weight and bias of x's own type; of groups only where all of them are aligned.
  const auto can_keep = [&](const NormMatrix& m) {
    return m.data == nullptr || ((m.type == ElementType::kFloat32) == (sizeof(T) == 4) &&
                                 (config.groups == 1 || m.group_bytes % 16 == 0));
  };
  const bool keeps = config.keeps_parameters && can_keep(p.weight) && can_keep(p.bias);
  const int kept_vectors = kFull ? kVectors : m.thread_vectors;
  const KeptVectors<T> kept_weight{shared_bytes + config.ring_bytes(), 0, kept_vectors};
  const KeptVectors<T> kept_bias{shared_bytes + config.ring_bytes(), 1, kept_vectors};
  if (keeps) {
    // Adding -0 changes nothing, not even the sign of a zero.
    const auto keep = [&](const KeptVectors<T>& kept, const NormMatrix& m, float absent) {
      const char* const from = m.data ? Target(m, place).data : nullptr;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!at.has(v)) continue;
        if (from) {
          kept.copy(v, from + at.first(v) * sizeof(T));
        } else {
          kept.fill(v, absent);
        }
      }
    };
    keep(kept_weight, p.weight, 1.0f);
    keep(kept_bias, p.bias, -0.0f);
  }
  const auto add_offset = [&](float (&w)[kVector]) {
    if (p.weight_offset != 0.0f) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) w[e] += p.weight_offset;
    }
  };
  const auto load_parameters = [&](const At& at, const Place& here, int v, float (&w)[kVector],
                                   float (&b)[kVector]) {
    const Target weight(p.weight, here), bias(p.bias, here);
#pragma unroll
    for (int e = 0; e < kVector; ++e) w[e] = 1.0f, b[e] = -0.0f;
    if (p.weight.data) {
      with_type<T>(p.weight.type,
                   [&](auto zero) { at.template load<decltype(zero)>(weight.data, v, w); });
    }
    if (p.bias.data) {
      with_type<T>(p.bias.type,
                   [&](auto zero) { at.template load<decltype(zero)>(bias.data, v, b); });
    }
    add_offset(w);
  };

  const float per_column = 1.0f / static_cast<float>(m.columns);
  // Of the columns that a row's threads in this warp have.
  const float part_columns = static_cast<float>(kInWarp ? m.columns : 32 * at.vectors * kVector);
  const float per_part_column = 1.0f / part_columns;
  const float per_cta_column = 1.0f / static_cast<float>(at.count);
  const int at_once = kInWarp ? config.at_once : 1;
  const bool early = !kInWarp && scales_early(p);
  uint32_t turn = 0;

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
        with_type<T>(p.residual.type, [&](auto zero) {
          const auto add = [&](const char* from) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
              if (!at.has(v)) continue;
              float added[kVector];
              at.template load<decltype(zero)>(from, v, added);
#pragma unroll
              for (int e = 0; e < kVector; ++e) values[v][e] += added[e];
            }
          };
          if (config.direct) {
            add(Target(p.residual, here).row(row));
          } else {
            add(staged[1].template in_stage<kFull>(ring.stage(), first_row, in_stage));
          }
        });
        if (p.residual_out.data) {
          with_type<T>(p.residual_out.type, [&](auto zero) {
            at.template store_row<decltype(zero)>(Target(p.residual_out, here).row(row), values,
                                                  has_row);
          });
        }
      }
      if constexpr (kInWarp) {
        __syncwarp();
        refill();
      }

      float mean = 0.0f, part_sum = 0.0f;
      if (p.layer) {
        part_sum = sum_of_elements(values, [](float value, float sum) { return sum + value; });
        part_sum = sum_lanes(part_sum, lanes);
        mean = __fmul_rn(part_sum, per_part_column);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (!at.has(v)) continue;
#pragma unroll
          for (int e = 0; e < kVector; ++e) values[v][e] -= mean;
        }
      }
      float squares =
          sum_of_elements(values, [](float value, float sum) { return fmaf(value, value, sum); });
      squares = sum_lanes(squares, lanes);
      float away = 0.0f;  // of the mean that values are deviations from, from the row's
      [[maybe_unused]] float largest_early = 0.0f;
      if constexpr (!kInWarp) {
        if (early) {
          const At now = at.recomputed();
          if (keeps) hopper::wait_for_copies();
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (!now.has(v)) continue;
            float w[kVector], b[kVector];
            if (keeps) {
              kept_weight.get(v, w);
              add_offset(w);
            } else {
              load_parameters(now, here, v, w, b);
            }
#pragma unroll
            for (int e = 0; e < kVector; ++e) {
              part_sum = max_or_nan(part_sum, fabsf(__fmul_rn(values[v][e], w[e])));
            }
          }
          part_sum = max_lanes(part_sum, lanes);
        }
        const float4 whole =
            exchange(shared, turn, place.cluster, {part_sum, squares, part_columns, mean},
                     Moments{p.layer, early, per_cta_column, per_column}, refill);
        largest_early = whole.x;
        squares = whole.y;
        away = mean - whole.w;
        mean = whole.w;
      }
      const float rstd = rsqrtf(fmaf(squares, per_column, p.eps));
      const int64_t of_row = int64_t{row} * config.groups + here.group;
      const bool tells = at.thread == 0 && here.rank == 0 && has_row;
      if (tells) {
        if (p.mean) p.mean[of_row] = mean;
        if (p.rstd) p.rstd[of_row] = rstd;
      }

      float scale = 1.0f;
      if (early) {
        scale = scale_of_row(largest_early * rstd);
        if (tells) p.row_scales[of_row] = scale;
      }
      const float factor = early ? scaled_root(rstd, scale) : rstd;
      const float shift = away * rstd;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          values[v][e] = kInWarp ? values[v][e] * rstd : fmaf(values[v][e], factor, shift);
        }
      }
      const At now = at.recomputed();
      if (keeps) {
        hopper::wait_for_copies();
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (!now.has(v)) continue;
          float w[kVector], b[kVector];
          kept_weight.get(v, w);
          kept_bias.get(v, b);
          add_offset(w);
#pragma unroll
          for (int e = 0; e < kVector; ++e) values[v][e] = fmaf(values[v][e], w[e], b[e]);
        }
      } else if (p.weight.data || p.bias.data) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (!now.has(v)) continue;
          float w[kVector], b[kVector];
          load_parameters(now, here, v, w, b);
#pragma unroll
          for (int e = 0; e < kVector; ++e) values[v][e] = fmaf(values[v][e], w[e], b[e]);
        }
      }
      const Target y(p.y, here, p.quantizes() ? 1 : size_of(p.y.type));
      if (!p.quantizes()) {
        with_type<T>(p.y.type, [&](auto zero) {
          now.template store_row<decltype(zero)>(y.row(row), values, has_row);
        });
        continue;
      }

      if (early) {
        now.template store_row<E4m3>(y.row(row), values, has_row);
        continue;
      }
      if (p.row_scales) {
        float largest = 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (!now.has(v)) continue;
#pragma unroll
          for (int e = 0; e < kVector; ++e) largest = max_or_nan(largest, fabsf(values[v][e]));
        }
        largest = max_lanes(largest, lanes);
        if constexpr (!kInWarp) {
          largest =
              exchange(shared, turn, place.cluster, {largest, 0.0f, 0.0f, 0.0f}, Largest{}, [] {
              }).x;
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
      now.template store_row<E4m3>(y.row(row), values, has_row);
    }
    if (config.direct) break;
    ring.advance();
  }
  if (place.cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
