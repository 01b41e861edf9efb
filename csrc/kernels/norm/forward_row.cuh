// What the forwards of vectors do with a row that a thread has its columns of in registers.
//
// Products are added by explicit fmaf(), or kept from that by __fmul_rn(): the compiler's choice
// could differ from kernel to kernel, and so a row's bits.
#pragma once

#include "hopper/async_copy.cuh"
#include "hopper/dependent_launch.cuh"
#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

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

// Whether a row's largest result is known with its sums: that of x * weight, times rstd. Else it
// takes an exchange of its own.
__device__ inline bool scales_early(const NormForward& p) {
  return p.row_scales && !p.layer && p.bias.data == nullptr;
}

struct Largest {
  __device__ float4 operator()(float4 part, int width, bool) const {
    return {max_lanes<kMaxWarps>(part.x, width), 0.0f, 0.0f, 0.0f};
  }
};

// Two of a 16-bit type. What an absent weight and bias are: adding -0 changes nothing, not even the
// sign of a zero.
template <class T>
inline constexpr uint32_t kOnes = sizeof(T) == 4                     ? 0x3f800000u
                                  : std::is_same_v<T, __nv_bfloat16> ? 0x3f803f80u
                                                                     : 0x3c003c00u;
template <class T>
inline constexpr uint32_t kMinusZeros = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;

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
  __device__ Words<4> words(int v) const { return load_words<4>(place + v * 512); }
  __device__ void get(int v, float (&values)[kVector]) const { unpack_words<T>(words(v), values); }
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

// The variance takes its two passes over registers. Over several warps and CTAs the parts' means
// and squared deviations are merged, in one exchange. kFull: as Columns'. kRing: of persistent
// CTAs.
template <class T, int kVectors, bool kInWarp, bool kFull, bool kRing>
struct ForwardRow {
  static constexpr int kVector = 16 / sizeof(T);
  using At = Columns<kVectors, kVector, kInWarp, kFull>;
  using Values = float[kVectors][kVector];

  const NormForward& p;
  const NormConfig& config;
  const At& at;
  Exchange& shared;
  const bool keeps;  // weight and bias, in shared memory
  const KeptVectors<T> kept_weight, kept_bias;
  uint32_t turn = 0;

  // `parameters`: a place in shared memory for those that are kept.
  __device__ ForwardRow(const NormForward& p, const NormConfig& config, const At& at,
                        Exchange& shared, char* parameters)
      : p(p),
        config(config),
        at(at),
        shared(shared),
        keeps(config.keeps_parameters && can_keep(p.weight) && can_keep(p.bias)),
        kept_weight(parameters, 0, kFull ? kVectors : config.mapping.thread_vectors),
        kept_bias(parameters, 1, kFull ? kVectors : config.mapping.thread_vectors) {}

  // Weight and bias are on their way then, if they are kept.
  __device__ void keep_parameters(const Place& place) const {
    if (!keeps) return;
    // Adding -0 changes nothing, not even the sign of a zero.
    keep(kept_weight, p.weight, place, 1.0f);
    keep(kept_bias, p.bias, place, -0.0f);
  }

  // Adds the residual, whose row begins at `from`, and stores the sum. take_x() puts x's vectors
  // into `values`: here, where the residual's loads needn't wait for them.
  template <class TakeX>
  __device__ void add_residual(Values& values, const TakeX& take_x, const char* from,
                               const Place& here, uint32_t row, bool has_row) const {
    with_type<T>(p.residual.type, [&](auto zero) {
      take_x();
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!at.has(v)) continue;
        float added[kVector];
        at.template load<decltype(zero)>(from, v, added);
#pragma unroll
        for (int e = 0; e < kVector; ++e) values[v][e] += added[e];
      }
    });
    if (!p.residual_out.data) return;
    with_type<T>(p.residual_out.type, [&](auto zero) {
      at.template store_row<decltype(zero), kRing>(Target(p.residual_out, here).row(row), values,
                                                   has_row);
    });
  }

  // From the row's values to its results. between() runs, over warps, after the first barrier of
  // the CTA.
  template <class Between>
  __device__ void finish(Values& values, const Place& here, uint32_t row, bool has_row,
                         const Between& between) {
    const NormMapping& m = config.mapping;
    const int lanes = kInWarp ? m.lanes : 32;  // of a warp that a row has
    const float per_column = config.per_column;
    // Of the columns that a row's threads in this warp have.
    const float part_columns = static_cast<float>(kInWarp ? m.columns : 32 * at.vectors * kVector);
    float mean = 0.0f, part_sum = 0.0f;
    if (p.layer) {
      part_sum = sum_of_elements(values, [](float value, float sum) { return sum + value; });
      part_sum = sum_lanes(part_sum, lanes);
      mean = __fmul_rn(part_sum, kInWarp ? per_column : 1.0f / part_columns);
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
    const bool early = scales_early(p);
    if (early) {
      with_parameters(here, [&](int v, const float (&w)[kVector], const float (&)[kVector]) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          values[v][e] = __fmul_rn(values[v][e], w[e]);
          part_sum = max_or_nan(part_sum, fabsf(values[v][e]));
        }
      });
      part_sum = max_lanes(part_sum, lanes);
    }
    if constexpr (!kInWarp) {
      const Moments merge{p.layer, early, config.per_cta_column, per_column};
      const float4 whole = exchange(shared, turn, here.cluster,
                                    {part_sum, squares, part_columns, mean}, merge, between);
      part_sum = whole.x;
      squares = whole.y;
      away = mean - whole.w;
      mean = whole.w;
    }
    const float rstd = rsqrtf(fmaf(squares, per_column, p.eps));
    // One thread, of a number a row.
    const auto tell = [&](float* of_rows, float value) {
      if (!of_rows || at.thread != 0 || here.rank != 0 || !has_row) return;
      uint32_t mine = row;
      asm volatile("" : "+r"(mine));  // an index to make anew each time
      of_rows[int64_t{mine} * config.groups + here.group] = value;
    };
    tell(p.mean, mean);
    tell(p.rstd, rstd);
    if (early) {
      const float scale = scale_of_row(part_sum * rstd);
      const float factor = scaled_root(rstd, 1.0f / scale);
      tell(p.row_scales, scale);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) values[v][e] = __fmul_rn(values[v][e], factor);
      }
      at.recomputed().template store_row<E4m3, kRing>(Target(p.y, here, 1).row(row), values,
                                                      has_row);
      return;
    }

    const float shift = away * rstd;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        values[v][e] = kInWarp ? values[v][e] * rstd : fmaf(values[v][e], rstd, shift);
      }
    }
    if (keeps || p.weight.data || p.bias.data) {
      with_parameters(here, [&](int v, const float (&w)[kVector], const float (&b)[kVector]) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) values[v][e] = fmaf(values[v][e], w[e], b[e]);
      });
    }
    const At now = at.recomputed();
    const Target y(p.y, here, p.quantizes() ? 1 : size_of(p.y.type));
    if (!p.quantizes()) {
      with_type<T>(p.y.type, [&](auto zero) {
        now.template store_row<decltype(zero), kRing>(y.row(row), values, has_row);
      });
      return;
    }
    float scale;
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
            exchange(shared, turn, here.cluster, {largest, 0.0f, 0.0f, 0.0f}, Largest{}, [] {}).x;
      }
      scale = scale_of_row(largest);
      tell(p.row_scales, scale);
    } else {
      scale = *p.scale;
    }
    const float per_scale = 1.0f / scale;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) values[v][e] *= per_scale;
    }
    now.template store_row<E4m3, kRing>(y.row(row), values, has_row);
  }

 private:
  __device__ static bool is_of_type(const NormMatrix& m) {
    return m.data == nullptr || (m.type == ElementType::kFloat32) == (sizeof(T) == 4);
  }
  // Those of x's own type; of groups only where all of them are aligned.
  __device__ bool can_keep(const NormMatrix& m) const {
    return m.data == nullptr || (is_of_type(m) && (config.groups == 1 || m.group_bytes % 16 == 0));
  }
  __device__ void keep(const KeptVectors<T>& kept, const NormMatrix& m, const Place& place,
                       float absent) const {
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
  }

  // use(v, w, b) with weight and bias of each vector; absent they change nothing.
  template <class Use>
  __device__ void with_parameters(const Place& here, const Use& use) const {
    const At now = at.recomputed();
    const auto add_offset = [&](float (&w)[kVector]) {
      if (p.weight_offset != 0.0f) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) w[e] += p.weight_offset;
      }
    };
    if (keeps) {
      hopper::wait_for_copies();
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!now.has(v)) continue;
        float w[kVector], b[kVector];
        kept_weight.get(v, w);
        kept_bias.get(v, b);
        add_offset(w);
        use(v, w, b);
      }
      return;
    }
    const Target weight(p.weight, here), bias(p.bias, here);
    const auto load_all = [&](const auto& load) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!now.has(v)) continue;
        float w[kVector], b[kVector];
#pragma unroll
        for (int e = 0; e < kVector; ++e) w[e] = 1.0f, b[e] = -0.0f;
        load(p.weight, weight, v, w);
        load(p.bias, bias, v, b);
        add_offset(w);
        use(v, w, b);
      }
    };
    // Without a choice of types between them the loads of all vectors are on their way at once.
    if (!kRing && is_of_type(p.weight) && is_of_type(p.bias)) {
      load_all([&](const NormMatrix& m, const Target& from, int v, float (&values)[kVector]) {
        if (m.data) now.template load<T>(from.data, v, values);
      });
    } else {
      load_all([&](const NormMatrix& m, const Target& from, int v, float (&values)[kVector]) {
        if (!m.data) return;
        with_type<T>(m.type,
                     [&](auto zero) { now.template load<decltype(zero)>(from.data, v, values); });
      });
    }
  }
};

}  // namespace ikbo::norm
