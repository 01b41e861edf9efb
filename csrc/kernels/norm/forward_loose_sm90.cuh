// The forward for interleaved columns, rows within a warp: of any length at any address, an element
// at a time.
//
// An element that passes shared memory in two bytes costs an instruction to read, one to convert,
// and two for the way back. That is less than the shifts that vectors take where each row begins
// elsewhere within 16 bytes, and leaves no slot idle. What memory sees is the same: whole stages.
//
//   global ──bulk copy──> stage ──2 or 4 bytes a lane──> registers ──> the same places ──bulk
//   copy──> global
//
// Results go back over x where they have its type and place modulo 16 bytes, else straight to
// global memory. A stage is filled again once its results have left, a stage later.
//
// Weight and bias wait in registers: in fp32, or where these are few in x's type.
#pragma once

#include "kernels/norm/forward_sm90.cuh"
#include "kernels/norm/loose.cuh"

namespace ikbo::norm {

// 1 / sqrt(value), with a step of Newton's behind the approximation, which alone is off by two
// units in the last place. Of 0 and infinity there is none.
__device__ inline float inverse_root(float value) {
  const float root = rsqrtf(value);
  const float off = fmaf(__fmul_rn(-value, root), root, 1.0f);
  const float better = fmaf(__fmul_rn(0.5f, root), off, root);
  return better == better ? better : root;
}

template <int kSlots, class At, class Add>
__device__ inline float sum_of_slots(const At& at, const float (&values)[kSlots], const Add& add) {
  float sums[4] = {};
  at.each([&](int i) { sums[i % 4] = add(values[i], sums[i % 4]); });
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// A thread's weight and bias.
template <class T, int kVectors, int kLanes>
struct LooseParameters {
  using At = LooseColumns<kVectors, 16 / sizeof(T), kLanes>;
  static constexpr bool kPacked = sizeof(T) == 2 && (kVectors > 3 || kLanes == 0);
  float weight[kPacked ? 1 : At::kSlots], bias[kPacked ? 1 : At::kSlots];
  uint32_t both[kPacked ? At::kSlots : 1];
  float offset;  // of weights; adding -0 changes nothing, not even the sign of a zero
  bool held;     // packed: both are of T

  __device__ LooseParameters(const NormForward& p, const Place& place, const At& at)
      : offset(p.weight_offset == 0.0f ? -0.0f : p.weight_offset) {
    const auto is_own = [&](const NormMatrix& m) {
      return m.data == nullptr || m.type == p.x.type;
    };
    held = !kPacked || (is_own(p.weight) && is_own(p.bias));
    if constexpr (kPacked) {
      float low[At::kSlots], high[At::kSlots];
      if (held) load<T>(p.weight, place, at, 1.0f, low), load<T>(p.bias, place, at, -0.0f, high);
      if (held) at.each([&](int i) { both[i] = pack<T>(low[i], high[i]); });
    } else {
      with_type<T>(p.weight.type,
                   [&](auto zero) { load<decltype(zero)>(p.weight, place, at, 1.0f, weight); });
      with_type<T>(p.bias.type,
                   [&](auto zero) { load<decltype(zero)>(p.bias, place, at, -0.0f, bias); });
      at.each([&](int i) { weight[i] += offset; });
    }
  }
  __device__ void apply(const NormForward& p, const Place& place, const At& at,
                        float (&values)[At::kSlots]) const {
    if constexpr (!kPacked) {
      at.each([&](int i) { values[i] = fmaf(values[i], weight[i], bias[i]); });
    } else if (held) {
      at.each([&](int i) {
        uint32_t packed = both[i];
        asm volatile("" : "+r"(packed));  // else the loop would keep what is unpacked
        const float2 pair = unpack<T>(packed);
        values[i] = fmaf(values[i], pair.x + offset, pair.y);
      });
    } else {
      at.each([&](int i) {
        const float w = load_one(p.weight, place, at, i, 1.0f) + offset;
        values[i] = fmaf(values[i], w, load_one(p.bias, place, at, i, -0.0f));
      });
    }
  }

 private:
  template <class U>
  __device__ static void load(const NormMatrix& m, const Place& place, const At& at, float absent,
                              float (&values)[At::kSlots]) {
    const char* const from = Target(m, place).data;
    at.each([&](int i) { values[i] = m.data ? at.template load<U>(from, i) : absent; });
  }
  __device__ static float load_one(const NormMatrix& m, const Place& place, const At& at, int slot,
                                   float absent) {
    if (m.data == nullptr) return absent;
    const char* const from = Target(m, place).data;
    float value;
    with_type<T>(m.type, [&](auto zero) { value = at.template load<decltype(zero)>(from, slot); });
    return value;
  }
};

template <class T, int kVectors, int kLanes>
__global__ void __launch_bounds__(kForwardThreads<kVectors, true>, kForwardCtas<kVectors, true>)
    norm_forward_loose_sm90(const __grid_constant__ NormForward p,
                            const __grid_constant__ NormConfig config) {
  using At = LooseColumns<kVectors, 16 / sizeof(T), kLanes>;
  constexpr int kAtOnce = 32 / kLanes;  // rows of a warp at once
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Staged operands[kForwardRings][2];
  __shared__ hopper::Barrier full[kForwardRings][NormConfig::kMaxStages];

  const NormMapping& m = config.mapping;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Place place = Place::of_cta<true>(config);
  const int mine = lane / kLanes;
  const At at = At::of_span(m, place.first_column);
  Staged* const staged = operands[warp];
  Ring<true, false> ring{config,
                         static_cast<uint32_t>(p.rows),
                         staged,
                         p.residual.data ? 2 : 1,
                         Staged::touches(p.x, at.count, config) &&
                             (!p.residual.data || Staged::touches(p.residual, at.count, config)),
                         shared_bytes + warp * config.stages * config.stage_bytes,
                         full[warp],
                         nullptr,
                         nullptr,
                         place.team * config.rings + warp};
  if (!config.direct) {
    if (lane < config.stages) hopper::init(full[warp][lane], 1);
    if (lane == 0) {
      lay_out(staged, place, at.count, config, p.x, p.residual);
    }
    hopper::fence_barrier_init();
    __syncwarp();
  }
  begin(p, config);
  hopper::allow_next_kernel();
  if (!config.direct) ring.load_first();

  const Target y(p.y, place, p.quantizes() ? 1 : size_of(p.y.type));
  const Outlet<T, true> outlet{ring, staged[0], p.y, place,
                               !config.direct && config.stages >= 3 && !p.quantizes() &&
                                   lies_as(p.y, p.x, place, at.count, config)};
  uint32_t turns = 0;  // of the ring
  const LooseParameters<T, kVectors, kLanes> parameters(p, place, at);
  const float per_column = 1.0f / static_cast<float>(m.columns);

  while (config.direct || ring.wait()) {
    const uint32_t first_row =
        config.direct ? (place.team * m.warps + warp) * kAtOnce : ring.first_row();
    const int count = config.direct ? static_cast<int>(min(int64_t{kAtOnce}, p.rows - first_row))
                                    : ring.rows_from(first_row);
    // Rows that touch lie one after the other from here on.
    const bool touching = !config.direct && staged[0].touches();
    const int step = touching ? staged[0].row_bytes : 0;
    char* const stage_x =
        touching ? const_cast<char*>(staged[0].template in_stage<false>(ring.stage(), first_row, 0))
                 : shared_bytes;
#pragma unroll 1
    for (int i = 0; i < count; i += kAtOnce) {
      const bool has_row = kAtOnce == 1 || i + mine < count;
      const int in_stage = has_row ? i + mine : i;
      const uint32_t row = first_row + in_stage;
      char* x = stage_x + in_stage * step;
      if (!touching && !config.direct) {
        x = const_cast<char*>(
            staged[0].template in_stage<false>(ring.stage(), first_row, in_stage));
      }

      float values[At::kSlots];
      // Apart, so that the compiler knows of each load which memory it is from.
      if (config.direct) {
        const char* const from = Target(p.x, place).row(row);
        at.each([&](int i) { values[i] = at.template load<T>(from, i); });
      } else {
        at.each([&](int i) { values[i] = at.template load<T>(x, i); });
      }
      if (p.residual.data) {
        with_type<T>(p.residual.type, [&](auto zero) {
          using U = decltype(zero);
          if (config.direct) {
            const char* const from = Target(p.residual, place).row(row);
            at.each([&](int i) { values[i] += at.template load<U>(from, i); });
          } else {
            const char* const from =
                staged[1].template in_stage<false>(ring.stage(), first_row, in_stage);
            at.each([&](int i) { values[i] += at.template load<U>(from, i); });
          }
        });
        if (p.residual_out.data && has_row) {
          with_type<T>(p.residual_out.type, [&](auto zero) {
            using U = decltype(zero);
            char* const to = Target(p.residual_out, place).row(row);
            at.each([&](int i) { at.store(to, i, static_cast<U>(values[i])); });
          });
        }
      }

      float mean = 0.0f;
      if (p.layer) {
        mean = sum_of_slots(at, values, [](float value, float sum) { return sum + value; });
        mean = __fmul_rn(sum_lanes<kLanes>(mean, kLanes), per_column);
        at.each([&](int i) {
          if (at.has(i)) values[i] -= mean;
        });
      }
      float squares =
          sum_of_slots(at, values, [](float value, float sum) { return fmaf(value, value, sum); });
      squares = sum_lanes<kLanes>(squares, kLanes);
      const float rstd = inverse_root(fmaf(squares, per_column, p.eps));
      const bool tells = at.first == 0 && has_row;
      const int64_t of_row = int64_t{row} * config.groups + place.group;
      if (tells) {
        if (p.mean) p.mean[of_row] = mean;
        if (p.rstd) p.rstd[of_row] = rstd;
      }
      at.each([&](int i) { values[i] *= rstd; });
      parameters.apply(p, place, at, values);

      if (outlet.in_place) {
        if (has_row) at.each([&](int i) { at.store(x, i, static_cast<T>(values[i])); });
        continue;
      }
      if (!p.quantizes()) {
        char* const to = y.row(row);
        with_type<T>(p.y.type, [&](auto zero) {
          using U = decltype(zero);
          if (has_row) at.each([&](int i) { at.store(to, i, static_cast<U>(values[i])); });
        });
        continue;
      }
      float scale, largest = 0.0f;
      at.each([&](int i) {
        if (at.has(i)) largest = max_or_nan(largest, fabsf(values[i]));
      });
      if (p.row_scales) {
        largest = max_lanes<kLanes>(largest, kLanes);
        scale = scale_of_row(largest);
        if (tells) p.row_scales[of_row] = scale;
      } else {
        scale = *p.scale;
      }
      const float per_scale = 1.0f / scale;
      if (has_row) {
        char* const to = y.row(row);
        at.each([&](int i) { at.store(to, i, to_e4m3(values[i] * per_scale)); });
      }
    }
    if (config.direct) break;
    __syncwarp();
    outlet.renew(ring.slot, ring.block, turns++ == 0);
    ring.advance();
  }
  outlet.finish();
}

}  // namespace ikbo::norm
