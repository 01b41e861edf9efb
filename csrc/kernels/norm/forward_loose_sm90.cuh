// The forward for interleaved columns: rows of any length at any address, an element at a time.
//
// An element that passes shared memory in two bytes costs an instruction to read, one to convert,
// and two for the way back. That is less than the shifts that vectors take where each row begins
// elsewhere within 16 bytes, and leaves no slot idle. What memory sees is the same: whole stages.
//
//   global ──bulk copy──> stage ──2 or 4 bytes a lane──> registers ──> the same places ──bulk
//   copy──> global
//
// Results go back over x where they have its type and place modulo 16 bytes, else straight to
// global memory. A stage is filled again once its results have left, a stage later: by its warp,
// or, of rows over warps, by a warp more, the porter, which they don't wait for.
//
//   of a stage  warps:  wait full[s]; registers, sums, results; arrive written[s]
//               porter: wait full[s], written[s]; store s; when what was stored before is read,
//               load
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

// Of rows over warps: two CTAs of 8 warps and the porter, in 96 registers; or one of up to 15 with
// four vectors a thread, in 128.
template <int kVectors, int kLanes>
inline constexpr int kLooseThreads = kLanes > 0      ? kForwardThreads<kVectors, true>
                                     : kVectors <= 2 ? 576
                                                     : 512;

template <class T, int kVectors, int kLanes>
__global__ void __launch_bounds__(kLooseThreads<kVectors, kLanes>,
                                  kForwardCtas<kVectors, (kLanes > 0)>)
    norm_forward_loose_sm90(const __grid_constant__ NormForward p,
                            const __grid_constant__ NormConfig config) {
  using At = LooseColumns<kVectors, 16 / sizeof(T), kLanes>;
  constexpr bool kInWarp = At::kInWarp;
  constexpr int kRowLanes = At::kStep, kAtOnce = 32 / kRowLanes;  // rows of a warp at once
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Exchange shared;
  constexpr int kRings = kInWarp ? kForwardRings : 1;
  __shared__ Staged operands[kRings][2];
  __shared__ hopper::Barrier full[kRings][NormConfig::kMaxStages];
  __shared__ hopper::Barrier written[NormConfig::kMaxStages];  // of rows over warps
  __shared__ uint32_t drawn[NormConfig::kMaxStages];

  const NormMapping& m = config.mapping;
  const int lane = threadIdx.x % 32, ring_index = kInWarp ? threadIdx.x / 32 : 0;
  const Place place = Place::of_cta<kInWarp>(config);
  const int mine = lane / kRowLanes;
  const At at = At::of_span(m, place.first_column);
  Staged* const staged = operands[ring_index];
  Ring<kInWarp, false> ring{config,
                            static_cast<uint32_t>(p.rows),
                            staged,
                            p.residual.data ? 2 : 1,
                            Staged::touches(p.x, at.count, config) &&
                                (!p.residual.data || Staged::touches(p.residual, at.count, config)),
                            shared_bytes + ring_index * config.stages * config.stage_bytes,
                            full[ring_index],
                            !kInWarp && place.rank == 0 ? p.counter : nullptr,
                            drawn,
                            place.team * config.rings + ring_index};
  const bool is_porter = !kInWarp && static_cast<int>(threadIdx.x / 32) == m.warps;
  if (is_porter || (kInWarp && !config.direct)) {
    if (lane < config.stages) {
      hopper::init(full[ring_index][lane], 1);
      if constexpr (!kInWarp) hopper::init(written[lane], m.warps);
    }
    if (lane == 0) {
      const int end = staged[0].init(p.x, place, at.count, config, config.pitches[0], 0);
      staged[1].init(p.residual, place, at.count, config, config.pitches[1], end);
      if constexpr (!kInWarp) shared.init();
    }
    hopper::fence_barrier_init();
    __syncwarp();
  }
  hopper::touch(p);
  hopper::touch(config);
  // Until here nothing was read that an earlier kernel may write.
  hopper::wait_for_previous_kernel();
  hopper::allow_next_kernel();
  if (kInWarp ? !config.direct : is_porter && lane == 0) ring.load_first();
  if (place.cluster > 1) {
    hopper::cluster_sync();
  } else if (!kInWarp && !config.direct) {
    __syncthreads();
  }

  const Target y(p.y, place, p.quantizes() ? 1 : size_of(p.y.type));
  const bool in_place = !config.direct && config.stages >= 3 && !p.quantizes() &&
                        lies_as(p.y, p.x, place, at.count, config);
  uint32_t turns = 0;  // of the ring
  const auto before = [&](int slot) { return (slot == 0 ? config.stages : slot) - 1; };
  // The results of a block, from its stage. By a warp; all have written theirs.
  const auto store_block = [&](int slot, uint32_t block) {
    const uint32_t first = block * config.rows_per_stage;
    const char* const stage = ring.bytes + slot * config.stage_bytes;
    store_span<T>(y.row(first), staged[0].template in_stage<false>(stage, first, 0),
                  ring.rows_from(first) * staged[0].row_bytes);
  };
  // By a warp, when all have done with the stage at hand.
  const auto renew = [&] {
    const bool loads = kInWarp || lane == 0;
    if (!in_place) {
      if (loads) ring.load_again(ring.slot, ring.block);
      return;
    }
    // Behind the barrier by the thread that stores: for who has written it would cost its wait.
    if (lane == 0) hopper::fence_shared_for_async();
    store_block(ring.slot, ring.block);
    // Another block for the stage that the results before have left.
    if (turns++ == 0) return;
    if (lane == 0) hopper::tma_store_wait_read<1>();
    if (loads) ring.load_again(before(ring.slot), ring.block - config.owners);
  };

  if constexpr (!kInWarp) {
    if (is_porter) {
      for (; ring.wait(); ring.advance()) {
        hopper::wait(written[ring.slot], ring.phase);
        renew();
        __syncwarp();
      }
      if (lane == 0) hopper::tma_store_wait_read<0>();
      if (place.cluster > 1) hopper::cluster_sync();
      return;
    }
  }

  const LooseParameters<T, kVectors, kLanes> parameters(p, place, at);
  const float per_column = 1.0f / static_cast<float>(m.columns);
  const float part_columns = static_cast<float>(at.columns);
  const float per_part_column = 1.0f / part_columns;
  const float per_cta_column = 1.0f / static_cast<float>(at.count);
  uint32_t turn = 0;

  while (config.direct || ring.wait()) {
    const uint32_t first_row = config.direct
                                   ? (place.team * (kInWarp ? m.warps : 1) + ring_index) * kAtOnce
                                   : ring.first_row();
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

      float mean = 0.0f, part_sum = 0.0f;
      if (p.layer) {
        part_sum = sum_of_slots(at, values, [](float value, float sum) { return sum + value; });
        part_sum = sum_lanes<kRowLanes>(part_sum, kRowLanes);
        mean = __fmul_rn(part_sum, per_part_column);
        at.each([&](int i) {
          if (at.has(i)) values[i] -= mean;
        });
      }
      float squares =
          sum_of_slots(at, values, [](float value, float sum) { return fmaf(value, value, sum); });
      squares = sum_lanes<kRowLanes>(squares, kRowLanes);
      float away = 0.0f;  // of the mean that values are deviations from, from the row's
      if constexpr (!kInWarp) {
        const float4 whole = exchange(
            shared, turn, place.cluster, {part_sum, squares, part_columns, mean},
            Moments{p.layer, false, per_cta_column, per_column}, [] {}, m.warps);
        squares = whole.y;
        away = mean - whole.w;
        mean = whole.w;
      }
      const float rstd = inverse_root(fmaf(squares, per_column, p.eps));
      const bool tells = at.first == 0 && place.rank == 0 && has_row;
      const int64_t of_row = int64_t{row} * config.groups + place.group;
      if (tells) {
        if (p.mean) p.mean[of_row] = mean;
        if (p.rstd) p.rstd[of_row] = rstd;
      }
      const float shift = away * rstd;
      at.each(
          [&](int i) { values[i] = kInWarp ? values[i] * rstd : fmaf(values[i], rstd, shift); });
      parameters.apply(p, place, at, values);

      if (in_place) {
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
        largest = max_lanes<kRowLanes>(largest, kRowLanes);
        if constexpr (!kInWarp) {
          const float4 part{largest, 0.0f, 0.0f, 0.0f};
          largest = exchange(shared, turn, place.cluster, part, Largest{}, [] {}, m.warps).x;
        }
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
    if constexpr (kInWarp) {
      renew();
    } else {
      if (lane == 0) hopper::arrive(written[ring.slot]);
    }
    ring.advance();
  }
  if (kInWarp && in_place && lane == 0) hopper::tma_store_wait_read<0>();
  if (place.cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
