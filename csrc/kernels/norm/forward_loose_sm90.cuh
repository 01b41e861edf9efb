// The forward for interleaved columns: of any length at any address, an element at a time.
//
// An element that passes shared memory in two bytes costs an instruction to read, one to convert,
// and two for the way back. That is less than the shifts that vectors take where each row begins
// elsewhere within 16 bytes, and leaves no slot idle. What memory sees is whole spans:
//
//   global ──bulk copy──> shared ──2 or 4 bytes a lane──> registers ──> over what was read ──bulk
//   copy──> global
//
// A unit of a few rows is loaded at once by a warp, where rows are short, or a CTA, or of each row
// its part by the CTAs of a cluster. They store it at once, too, and end: what covers memory's
// latency is many of them an SM, not a ring.
//
// Results go over x and their sums over the residual, 16 bytes before it: so a row, wherever it
// begins within 16 bytes, ends before the next one that is still to be read. Results in more bits,
// or further apart than what came, go straight to global memory.
//
// Weight and bias are in registers, in x's type or in fp32, before the rows are there.
#pragma once

#include "hopper/dependent_launch.cuh"
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

// Threads that registers are shared out to: of a CTA, at most, and of the CTAs of an SM. Values and
// parameters take a register a slot each, and those of fp32 two.
template <int kLanes, bool kCluster>
inline constexpr int kLooseThreads = kLanes > 0 ? 32 * kNormUnitWarps
                                     : kCluster ? 320
                                                : 256;
template <class T, int kVectors, int kLanes, bool kPlain, bool kCluster>
constexpr int loose_ctas() {
  constexpr int kHeld = kVectors * 16 / sizeof(T) * (sizeof(T) == 2 ? 2 : 3);
  if (!kPlain) return kLanes == 0 ? 1 : 4;
  if (kLanes == 0) return kCluster ? 2 : 3;
  return kHeld <= 16 ? 10 : kHeld <= 32 ? 8 : kHeld <= 48 ? 7 : 5;
}

template <class T, bool kPlain, class Body>
__device__ inline void with_type_of(ElementType type, const Body& body) {
  if constexpr (kPlain) {
    body(T{});
  } else {
    with_type<T>(type, body);
  }
}

// A thread's weight and bias, in x's type or, of others, in fp32.
template <class T, class At, bool kPlain>
struct LooseParameters {
  static constexpr bool kPacked = sizeof(T) == 2;
  float weight[kPacked ? 1 : At::kSlots], bias[kPacked ? 1 : At::kSlots];
  uint32_t both[kPacked ? At::kSlots : 1];
  bool held;  // packed: both are of T

  __device__ LooseParameters(const NormForward& p, const Place& place, const At& at) {
    const auto is_own = [&](const NormMatrix& m) {
      return m.data == nullptr || m.type == p.x.type;
    };
    held = kPlain || !kPacked || (is_own(p.weight) && is_own(p.bias));
    if constexpr (kPacked) {
      if (!held) return;
      // All loads are on their way before the first is used.
      load<T>(p.weight, place, at, 1.0f, [&](int i, T value) { both[i] = bits(value); });
      uint32_t high[At::kSlots];
      load<T>(p.bias, place, at, -0.0f, [&](int i, T value) { high[i] = bits(value); });
      at.each([&](int i) { both[i] = __byte_perm(both[i], high[i], 0x5410); });
    } else {
      with_type_of<T, kPlain>(p.weight.type, [&](auto zero) {
        load<decltype(zero)>(p.weight, place, at, 1.0f,
                             [&](int i, auto w) { weight[i] = static_cast<float>(w); });
      });
      with_type_of<T, kPlain>(p.bias.type, [&](auto zero) {
        load<decltype(zero)>(p.bias, place, at, -0.0f,
                             [&](int i, auto b) { bias[i] = static_cast<float>(b); });
      });
    }
  }
  __device__ void apply(const NormForward& p, const Place& place, const At& at,
                        float (&values)[At::kSlots]) const {
    const float offset = p.weight_offset;
    if (held && offset == 0.0f) {
      with_held(at, [&](int i, float w, float b) { values[i] = fmaf(values[i], w, b); });
    } else if (held) {
      with_held(at, [&](int i, float w, float b) { values[i] = fmaf(values[i], w + offset, b); });
    } else {
      at.each([&](int i) {
        const float w = load_one(p.weight, place, at, i, 1.0f) + offset;
        values[i] = fmaf(values[i], w, load_one(p.bias, place, at, i, -0.0f));
      });
    }
  }

  // body(slot, weight, bias), where held and without an offset.
  template <class Body>
  __device__ void with_held(const At& at, const Body& body) const {
    at.each([&](int i) {
      if constexpr (kPacked) {
        uint32_t packed = both[i];
        asm volatile("" : "+r"(packed));  // else the loop would keep what is unpacked
        const float2 pair = unpack<T>(packed);
        body(i, pair.x, pair.y);
      } else {
        body(i, weight[i], bias[i]);
      }
    });
  }

 private:
  __device__ static uint32_t bits(T value) { return reinterpret_cast<const uint16_t&>(value); }
  template <class U, class Body>
  __device__ static void load(const NormMatrix& m, const Place& place, const At& at, float absent,
                              const Body& body) {
    if (m.data) {
      const char* const from = Target(m, place, sizeof(U)).data;
      at.each([&](int i) { body(i, at.template load_any<U>(from, i)); });
    } else {
      at.each([&](int i) { body(i, static_cast<U>(absent)); });
    }
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

// The rows of a unit, and where they are in shared memory.
struct LooseUnit {
  char* stage;
  uint32_t first;
  int count;
  Staged x, residual;

  // One behind the other, in memory and here.
  template <class T>
  __device__ static LooseUnit plain(char* stage, uint32_t first, int count, const NormForward& p,
                                    int columns) {
    LooseUnit rows{stage, first, count};
    rows.x = side_by_side(p.x.data, columns * sizeof(T), 16);
    return rows;
  }
  template <class T, bool kSideBySide>
  __device__ static Staged plain_y(const NormForward& p, const Place& place, int columns,
                                   const NormConfig& config) {
    Staged y = side_by_side(p.y.data, columns * sizeof(T), 0);
    if (!kSideBySide) y.init(p.y, place, columns, config, config.pitches[0], 0, sizeof(T));
    return y;
  }
  __device__ static Staged side_by_side(const void* data, int row_bytes, int offset) {
    return {static_cast<const char*>(data), row_bytes, row_bytes, row_bytes, offset};
  }
  __device__ LooseUnit(char* stage_, uint32_t first_, int count_)
      : stage(stage_), first(first_), count(count_), residual{} {}
  __device__ LooseUnit(char* stage_, uint32_t first_, int count_, const NormForward& p,
                       const Place& place, int columns, const NormConfig& config)
      : stage(stage_), first(first_), count(count_), residual{} {
    const int end = x.init(p.x, place, columns, config, config.pitches[0], 16, size_of(p.x.type));
    if (p.residual.data) {
      residual.init(p.residual, place, columns, config, config.pitches[1], end + 16,
                    size_of(p.residual.type));
    }
  }
  // By a warp.
  __device__ void load_plain(hopper::Barrier& full) const {
    if (threadIdx.x % 32 > 0) return;
    hopper::arrive_expect_bytes(full, x.load_at_once<false>(stage, first, count, full));
  }
  __device__ void load(const NormForward& p, hopper::Barrier& full) const {
    const int lane = threadIdx.x % 32;
    if (x.touches() && (!p.residual.data || residual.touches())) {
      if (lane > 0) return;
      uint32_t bytes = x.load_at_once<false>(stage, first, count, full);
      if (p.residual.data) bytes += residual.load_at_once<false>(stage, first, count, full);
      hopper::arrive_expect_bytes(full, bytes);
    } else {
      uint32_t bytes = x.load_rows<false>(stage, first, count, lane, 32, full);
      if (p.residual.data) bytes += residual.load_rows<false>(stage, first, count, lane, 32, full);
      if (lane > 0 && bytes > 0) hopper::expect_bytes(full, bytes);
      __syncwarp();  // all bytes are expected
      if (lane == 0) hopper::arrive_expect_bytes(full, bytes);
    }
  }
  // Of x, the residual, or results that take their places.
  __device__ const char* place_of(const Staged& rows, int i) const {
    return rows.in_stage<false>(stage, first, i);
  }
  // Results, by a warp, when all have put theirs in place and it knows of it.
  __device__ void store(const Staged& results) const {
    const int step = results.touches() ? count : 1;
#pragma unroll 1
    for (int i = 0; i < count; i += step) {
      store_span<char>(const_cast<char*>(results.source(first + i)), place_of(results, i),
                       step * results.row_bytes);
    }
  }
};

// Results on their way to memory, over an operand whose rows have been read. Built in place: of one
// that a function returned nvcc 13.0 took the stores to global memory for ones to local memory.
struct LooseOutlet {
  const LooseUnit& unit;
  Staged rows;
  bool staged;  // else they are stored by themselves

  // Of y, over x, or of x + residual, over the residual.
  __device__ LooseOutlet(const LooseUnit& unit_, const NormForward& p, const Place& place,
                         int columns, const NormConfig& config, bool sums)
      : unit(unit_) {
    const Staged& over = sums ? unit.residual : unit.x;
    const NormMatrix& from = sums ? p.residual : p.x;
    const NormMatrix& to = sums ? p.residual_out : p.y;
    const int size = !sums && p.quantizes() ? 1 : size_of(to.type);
    rows.init(to, place, columns, config, config.pitches[sums], over.offset - 16, size);
    staged = size <= size_of(from.type) && rows.step <= over.step;
  }
  // A unit's i-th row, by threads that have columns of it.
  template <class At, class Value>
  __device__ void put(const At& at, int i, const Value& value) const {
    if (staged) {
      char* const to = const_cast<char*>(unit.place_of(rows, i));
      at.each([&](int slot) { at.store(to, slot, value(slot)); });
    } else {
      char* const to = const_cast<char*>(rows.source(unit.first + i));
      at.each([&](int slot) { at.store(to, slot, value(slot)); });
    }
  }
  __device__ void store() const {
    if (staged) unit.store(rows);
  }
};

// kPlain: rows that lie one behind the other, all operands in x's type, no residual, offset, groups
// nor scale; nor clusters, unless kCluster. Nothing of these is asked about then.
template <class T, int kVectors, int kLanes, bool kPlain, int kSure = 0, bool kCluster = false>
__global__ void __launch_bounds__(kLooseThreads<kLanes, kCluster>,
                                  loose_ctas<T, kVectors, kLanes, kPlain, kCluster>())
    norm_forward_loose_sm90(const __grid_constant__ NormForward p,
                            const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  using At = LooseColumns<kVectors, kVector, kLanes, kSure ? kSure : kVectors / 2 * kVector>;
  constexpr bool kInWarp = At::kInWarp;
  constexpr int kAtOnce = kInWarp ? 32 / kLanes : 1;  // rows of a warp at once
  constexpr int kRowLanes = kInWarp ? kLanes : 32;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ hopper::Barrier full[kInWarp ? kNormUnitWarps : 1];
  __shared__ Exchange shared;

  const NormMapping& m = config.mapping;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int unit = kInWarp ? warp : 0;  // of the CTA's
  constexpr bool kSideBySide = kPlain && !kCluster;
  const Place place = kSideBySide ? Place{1, 0, 0, blockIdx.x, 0} : Place::of_cta<kInWarp>(config);
  const int mine = kInWarp ? lane / kLanes : 0;
  const At at = At::of_span(m, place.first_column);
  const uint32_t first_row =
      (place.team * config.rings + unit) * static_cast<uint32_t>(config.rows_per_stage);
  if (kInWarp && first_row >= p.rows) return;
  const int count = static_cast<int>(
      min(static_cast<uint32_t>(config.rows_per_stage), static_cast<uint32_t>(p.rows) - first_row));
  char* const stage = shared_bytes + unit * config.stage_bytes;
  const LooseUnit rows = kSideBySide
                             ? LooseUnit::plain<T>(stage, first_row, count, p, at.count)
                             : LooseUnit(stage, first_row, count, p, place, at.count, config);
  const bool has_residual = !kPlain && p.residual.data;
  const bool has_sums = has_residual && p.residual_out.data;

  if (kInWarp || warp == 0) {
    if (lane == 0) {
      hopper::init(full[unit], 1);
      if (!kInWarp && place.cluster > 1) shared.init();
      hopper::fence_barrier_init();
    }
    __syncwarp();
  }
  begin(p, config);
  hopper::allow_next_kernel();
  if (kInWarp || warp == 0) {
    if constexpr (kSideBySide) {
      rows.load_plain(full[unit]);
    } else {
      rows.load(p, full[unit]);
    }
    __syncwarp();
  }
  const LooseParameters<T, At, kPlain> parameters(p, place, at);
  const float per_column = config.per_column;
  const float per_part_column =
      kInWarp ? per_column : __fdividef(1.0f, static_cast<float>(at.columns));
  // The last CTA of a cluster may have fewer columns.
  const float per_cta_column = kSideBySide || at.count == m.cta_columns
                                   ? config.per_cta_column
                                   : __fdividef(1.0f, static_cast<float>(at.count));
  meet<kInWarp>(place);  // barriers are there
  hopper::wait(full[unit], 0);
  [[maybe_unused]] uint32_t exchanges = 0;

#pragma unroll 1
  for (int i = 0; i < count; i += kAtOnce) {
    const bool has_row = kAtOnce == 1 || i + mine < count;
    const int in_unit = has_row ? i + mine : i;
    float values[At::kSlots];
    // Four sums side by side: one would wait for each addition.
    const auto add_up = [&](const auto& add) {
      float sums[4] = {};
      at.each([&](int s) { sums[s % 4] = add(s, sums[s % 4]); });
      return sum_lanes<kRowLanes>((sums[0] + sums[1]) + (sums[2] + sums[3]), kRowLanes);
    };
    const char* const from_x = rows.place_of(rows.x, in_unit);
    const auto load = [&](int s) { values[s] = at.template load_padded<T>(from_x, s); };
    if (has_residual) {
      at.each(load);
      const char* const from = rows.place_of(rows.residual, in_unit);
      with_type<T>(p.residual.type, [&](auto zero) {
        at.each([&](int s) { values[s] += at.template load_padded<decltype(zero)>(from, s); });
      });
      if (has_sums) {
        // Over the residual, which all have read first.
        const LooseOutlet sums(rows, p, place, at.count, config, true);
        if constexpr (kInWarp) {
          __syncwarp();
        } else {
          __syncthreads();
        }
        with_type<T>(p.residual_out.type, [&](auto zero) {
          using U = decltype(zero);
          if (has_row) sums.put(at, in_unit, [&](int s) { return static_cast<U>(values[s]); });
        });
      }
    }

    float mean = 0.0f, part_sum = 0.0f, squares;
    if (p.layer) {
      part_sum = add_up([&](int s, float sum) {
        if (!has_residual) load(s);
        return sum + values[s];
      });
      mean = __fmul_rn(part_sum, per_part_column);
      squares = add_up([&](int s, float sum) {
        if (at.has(s)) values[s] -= mean;
        return fmaf(values[s], values[s], sum);
      });
    } else {
      squares = add_up([&](int s, float sum) {
        if (!has_residual) load(s);
        return fmaf(values[s], values[s], sum);
      });
    }
    float away = 0.0f;  // of the mean that values are deviations from, from the row's
    if constexpr (!kInWarp) {
      // Behind its barrier all have read x.
      const float4 whole = exchange(shared, exchanges, place.cluster,
                                    {part_sum, squares, static_cast<float>(at.columns), mean},
                                    Moments{p.layer, false, per_cta_column, per_column}, [] {});
      squares = whole.y;
      away = mean - whole.w;
      mean = whole.w;
    }
    const float rstd = inverse_root(fmaf(squares, per_column, p.eps));
    const bool tells =
        kInWarp ? lane % kLanes == 0 && has_row : threadIdx.x == 0 && place.rank == 0;
    const int64_t of_row =
        kPlain ? first_row + in_unit : int64_t{first_row + in_unit} * config.groups + place.group;
    if (tells) {
      if (p.mean) p.mean[of_row] = mean;
      if (p.rstd) p.rstd[of_row] = rstd;
    }
    const float shift = away * rstd;
    const auto normalized = [&](int s) {
      return kInWarp ? values[s] * rstd : fmaf(values[s], rstd, shift);
    };
    if constexpr (kPlain) {
      char* const to = const_cast<char*>(
          rows.place_of(LooseUnit::plain_y<T, kSideBySide>(p, place, at.count, config), in_unit));
      if (has_row) {
        parameters.with_held(at, [&](int s, float w, float b) {
          at.store(to, s, static_cast<T>(fmaf(normalized(s), w, b)));
        });
      }
      continue;
    }
    at.each([&](int s) { values[s] = normalized(s); });
    parameters.apply(p, place, at, values);

    const LooseOutlet y(rows, p, place, at.count, config, false);
    if (!p.quantizes()) {
      with_type<T>(p.y.type, [&](auto zero) {
        using U = decltype(zero);
        if (has_row) y.put(at, in_unit, [&](int s) { return static_cast<U>(values[s]); });
      });
      continue;
    }
    float scale;
    if (p.row_scales) {
      float largest = 0.0f;
      at.each([&](int s) {
        if (at.has(s)) largest = max_or_nan(largest, fabsf(values[s]));
      });
      largest = max_lanes<kRowLanes>(largest, kRowLanes);
      if constexpr (!kInWarp) {
        largest =
            exchange(shared, exchanges, place.cluster, {largest, 0.0f, 0.0f, 0.0f}, Largest{}, [] {
            }).x;
      }
      scale = scale_of_row(largest);
      if (tells) p.row_scales[of_row] = scale;
    } else {
      scale = *p.scale;
    }
    const float per_scale = 1.0f / scale;
    if (has_row) y.put(at, in_unit, [&](int s) { return to_e4m3(values[s] * per_scale); });
  }

  if constexpr (kInWarp) {
    __syncwarp();
  } else {
    __syncthreads();
    if (warp > 0) return;
  }
  // By the thread that stores: for those who have written it would cost a wait.
  if (lane == 0) hopper::fence_shared_for_async();
  if constexpr (kPlain) {
    rows.store(LooseUnit::plain_y<T, kSideBySide>(p, place, at.count, config));
  } else {
    LooseOutlet(rows, p, place, at.count, config, false).store();
    if (has_sums) LooseOutlet(rows, p, place, at.count, config, true).store();
  }
  if (lane == 0) hopper::tma_store_wait_read<0>();
}

}  // namespace ikbo::norm
