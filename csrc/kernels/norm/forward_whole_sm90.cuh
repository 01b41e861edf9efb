// The forwards of rows of whole aligned vectors: a grid has threads for every row, and none of them
// takes a second one. A thread's vectors go from global memory straight into its registers; what
// covers memory's latency is many CTAs an SM, not stages.
//
// Sums are added in the order of norm_forward_sm90, so the bits are the same.
#pragma once

#include "kernels/norm/compiled.h"
#include "kernels/norm/forward_row.cuh"

namespace ikbo::norm {

// Which row a thread of a team has, and which of the row's threads it is.
template <bool kInWarp>
struct WholeRow {
  uint32_t row;
  int thread;
  bool exists;  // threads without a row read the last one: all of a warp shuffle

  __device__ WholeRow(uint32_t team, uint32_t rows, int lanes)
      : row(team), thread(static_cast<int>(threadIdx.x)), exists(true) {
    if constexpr (kInWarp) {
      const int shift = __ffs(lanes) - 1;
      row = team * (blockDim.x >> shift) + (threadIdx.x >> shift);
      thread &= lanes - 1;
      exists = row < rows;
      row = min(row, rows - 1);
    }
  }
};

// The sum over the warps of a CTA that has both parts of a row that elsewhere is a cluster of
// two's: in the order of exchange(), so the bits are the same.
__device__ inline float exchange_halves(Exchange& shared, int warps, int half, float value) {
  const int warp = threadIdx.x / 32 - half * warps, lane = threadIdx.x % 32;
  const int width = 1 << (32 - __clz(warps - 1));
  if (lane == 0) shared.of_warp[half][warp].y = value;
  __syncthreads();
  const int peer = lane & (width - 1);
  value = peer < warps ? shared.of_warp[lane / kMaxWarps][peer].y : 0.0f;
  value = sum_lanes<kMaxWarps>(value, width);
  return value + __shfl_xor_sync(0xffffffffu, value, kMaxWarps);
}

// Of numbers without a sign, or NaN, over a warp: in one instruction.
__device__ inline float max_of_warp(float value) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(value)));
}

// What exchange() makes of the warps' sums and squared deviations from their own means, with
// Moments, where all have as many columns: in the same order, so the bits are the same. Returns the
// row's mean and squared deviations; or without means the sum of squares and, ahead of it where
// kLargest, the largest of what is there in place of sums.
template <bool kLayer, bool kLargest = false>
__device__ inline float2 exchange_warps(float2* of_warp, int warps, float2 part, float part_columns,
                                        float per_column) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int width = warps <= 1 ? 1 : 1 << (32 - __clz(warps - 1));
  if (lane == 0) of_warp[warp] = part;
  __syncthreads();
  const int peer = lane & (width - 1);
  part = peer < warps ? of_warp[peer] : float2{0.0f, 0.0f};
  float first = 0.0f;
  if constexpr (kLayer) {
    first = __fmul_rn(sum_lanes<kMaxWarps>(part.x, width), per_column);
    const float away = __fmul_rn(part.x, 1.0f / part_columns) - first;
    if (peer < warps) part.y = fmaf(part_columns * away, away, part.y);
  }
  if constexpr (kLargest) first = max_of_warp(part.x);
  return {first, sum_lanes<kMaxWarps>(part.y, width)};
}

// As NormConfig::ordinary_from says, after the row is read. It asks the special registers once more
// where its columns are: a kernel's other registers are all taken.
template <int kVectors>
__device__ inline void make_ordinary(const PlainForward& p) {
  if (!p.evict_last) return;
  uint32_t row, thread;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(row));
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  if (row < p.ordinary_from) return;
  const char* const from = p.x + uint64_t{row} * p.x_bytes + thread * 16;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) hopper::evict_as_others(from + v * blockDim.x * 16);
}

// Within warps registers for many vectors of weight and bias cost a LayerNorm rows at once: of 1024
// columns 2 %.
template <int kVectors, int kLanes, bool kLayer, WholeForm kForm>
constexpr bool loads_weights_early() {
  if (kForm != WholeForm::kEarly) return false;
  return kLanes == 0 || !kLayer || kVectors < 4 || (kVectors == 4 && kLanes < 32);
}

// Registers a thread, which decide how many rows an SM works on. Within warps: what holds x, weight
// and bias at once. Over warps: 32 warps of those of 4 vectors, but where these don't suffice; both
// halves of a row 64.
template <int kVectors, int kLanes, bool kLayer, WholeForm kForm>
constexpr int plain_registers() {
  if (kForm == WholeForm::kHalves) return 32;
  if (kForm == WholeForm::kEarly && kLanes == 0) return 128;
  if (kVectors > 5) return 128;
  if (kVectors > 2 && loads_weights_early<kVectors, kLanes, kLayer, kForm>()) {
    // Of 768 columns more rows at once are 1 % quicker; of 384 they are 3 % slower.
    if (!kLayer && kVectors == 3 && kLanes == 32) return 48;
    return kLayer ? 24 * kVectors : 16 + 16 * kVectors;
  }
  if (kForm == WholeForm::kEarly && kLayer) return 40 + 8 * kVectors;
  return kVectors == 1 ? 32 : 32 + 8 * kVectors;
}

// x, y, a weight and, beside means, a bias of one type, without a residual. Groups, weight_offset
// and other choices of weight and bias are those of kHeads alone. A row is kept packed and unpacked
// again in each pass; halves are read again. kLanes: a row's threads, or 0 over any number of
// warps.
template <class T, int kVectors, int kLanes, bool kLayer, WholeForm kForm>
__global__ void __maxnreg__((plain_registers<kVectors, kLanes, kLayer, kForm>()))
    norm_forward_plain_sm90(const __grid_constant__ PlainForward p) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr bool kHalves = kForm == WholeForm::kHalves, kHeads = kForm == WholeForm::kHeads;
  constexpr bool kInWarp = kLanes > 0 && kLanes <= 32;
  constexpr bool kEarly = loads_weights_early<kVectors, kLanes, kLayer, kForm>();
  constexpr bool kEvictsLast = !kInWarp && !kHeads;
  static_assert(!kLayer || (!kHalves && !kHeads));
  hopper::touch(p);
  hopper::wait_for_previous_kernel();
  hopper::allow_next_kernel();
  uint32_t row = blockIdx.x, group = 0;
  if constexpr (kHeads) {
    group = row % p.groups;
    row /= p.groups;
  }
  int thread = threadIdx.x;
  bool exists = true;  // threads without a row read the last one: all of a warp shuffle
  if constexpr (kInWarp) {
    row = row * (blockDim.x / kLanes) + threadIdx.x / kLanes;
    thread %= kLanes;
    exists = row < p.rows;
    row = min(row, p.rows - 1);
  }
  const int lanes = kLanes > 0 ? kLanes : blockDim.x / (kHalves ? 2 : 1);
  const int half = kHalves && thread >= lanes;

  // Vectors lie `step` bytes from one another, from the first byte of a row that is the thread's.
  const int step = 16 * lanes;
  int first = (half * (kVectors - 1) * lanes + thread) * 16;
  const auto of_group = [&](auto data, int64_t group_bytes) {
    return kHeads ? data + group * group_bytes : data;
  };
  Words<4> x[kVectors];
  const auto load_x = [&](auto in_l1) {
    const char* const from = of_group(p.x, p.x_group_bytes) + uint64_t{row} * p.x_bytes + first;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kEvictsLast) {
        x[v] = load_words<in_l1>(from + v * step, hopper::evict_last_if(p.evict_last));
      } else {
        x[v] = load_words<4>(from + v * step);
      }
    }
  };
  using L1 = InL1;
  load_x(std::integral_constant<InL1, kHalves ? L1::kLonger : L1::kAsOthers>{});
  // Asking whether there is one costs a quarter of all instructions, so that only kHeads does.
  const auto load_parameter = [&](const char* data, int64_t group_bytes, int v, uint32_t absent) {
    if (kHeads && data == nullptr) return Words<4>{absent, absent, absent, absent};
    return load_words_to_stay(of_group(data, group_bytes) + (first + v * step));
  };
  // All of them or, later, a vector ahead of the one at hand (fp32's halves: at hand).
  constexpr int kHeld = kEarly ? kVectors : 1;
  constexpr bool kAhead = !kEarly && !(kHalves && kVector == 4);
  constexpr bool kHasBias = kLayer || kHeads;
  Words<4> weight[kHeld], bias[kHeld];
  const auto load_parameters = [&](int v) {
    weight[v % kHeld] = load_parameter(p.weight, p.weight_group_bytes, v, kOnes<T>);
    if constexpr (kHasBias) {
      bias[v % kHeld] = load_parameter(p.bias, p.bias_group_bytes, v, kMinusZeros<T>);
    }
  };
  if constexpr (kEarly) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load_parameters(v);
  }

  const auto values_of = [&](int v, float (&values)[kVector]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(x[v].word[i]));
    unpack_words<T>(x[v], values);
  };
  // As sum_of_elements().
  const auto sum_over = [&](const auto& add) {
    float sums[4] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float values[kVector];
      values_of(v, values);
#pragma unroll
      for (int e = 0; e < kVector; ++e) sums[e % 4] = add(values[e], sums[e % 4]);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  };
  constexpr int kShuffled = kInWarp ? kLanes : 32;
  constexpr float kPartColumns = 32.0f * kVectors * kVector;  // over warps: of a warp
  float sum = 0.0f, mean = 0.0f;
  if constexpr (kLayer) {
    sum = sum_lanes(sum_over([](float value, float sum) { return sum + value; }), kShuffled);
    mean = __fmul_rn(sum, kInWarp ? p.per_column : 1.0f / kPartColumns);
  }
  float squares = sum_over([&](float value, float sum) {
    const float away = kLayer ? value - mean : value;
    return fmaf(away, away, sum);
  });
  squares = sum_lanes(squares, kShuffled);
  float of_row = mean, shift = 0.0f;
  if constexpr (kHalves) {
    __shared__ Exchange shared;
    squares = exchange_halves(shared, lanes / 32, half, squares);
    load_x(std::integral_constant<InL1, L1::kShorter>{});
  } else if constexpr (!kInWarp) {
    __shared__ float2 of_warp[kMaxWarps];
    const float2 whole =
        exchange_warps<kLayer>(of_warp, lanes / 32, {sum, squares}, kPartColumns, p.per_column);
    squares = whole.y;
    if constexpr (kLayer) of_row = whole.x, shift = mean - of_row;
  }
  const float rstd = rsqrtf(fmaf(squares, p.per_column, p.eps));
  if (thread == 0 && exists) {
    const int64_t index = kHeads ? int64_t{row} * p.groups + group : row;
    if (kLayer && p.mean) p.mean[index] = of_row;
    if (p.rstd) p.rstd[index] = rstd;
  }
  shift *= rstd;

  // Addresses are made anew, and not kept in registers.
  asm volatile("" : "+r"(first));
  char* const to = of_group(p.y, p.y_group_bytes) + uint64_t{row} * p.y_bytes + first;
  if constexpr (kAhead) load_parameters(0);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (!kEarly && !kAhead) load_parameters(v);
    float values[kVector], w[kVector], b[kVector];
    unpack_words<T>(weight[v % kHeld], w);
    if constexpr (kHasBias) unpack_words<T>(bias[v % kHeld], b);
    // No load goes ahead of a store by itself.
    if (kAhead && v + 1 < kVectors) load_parameters(v + 1);
    values_of(v, values);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      if constexpr (kLayer) values[e] -= mean;
      // Over warps a zero's sign is the sum's, as in ForwardRow.
      values[e] = kInWarp ? values[e] * rstd : fmaf(values[e], rstd, shift);
      if constexpr (kHeads) w[e] += p.weight_offset;  // -0 where there is none
      values[e] = kHasBias ? fmaf(values[e], w[e], b[e]) : __fmul_rn(values[e], w[e]);
    }
    if (exists) store_words<false>(to + v * step, pack_words<T>(values));
  }
  if constexpr (kEvictsLast) make_ordinary<kVectors>(p);
}

template <int kVectors, bool kInWarp>
inline constexpr int kWholeRegisters = kVectors > 5   ? 192
                                       : kVectors > 4 ? 128
                                                      : 80;

// All others.
template <class T, int kVectors, bool kInWarp>
__global__ void __maxnreg__((kWholeRegisters<kVectors, kInWarp>))
    norm_forward_whole_sm90(const __grid_constant__ NormForward p,
                            const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  using Row = ForwardRow<T, kVectors, kInWarp, true, false>;
  extern __shared__ __align__(16) char kept[];
  __shared__ Exchange shared;
  const NormMapping& m = config.mapping;
  begin(p, config);
  hopper::allow_next_kernel();
  const Place place = Place::of_cta<kInWarp>(config);
  const WholeRow<kInWarp> row(place.team, static_cast<uint32_t>(p.rows), m.lanes);
  const typename Row::At at = Row::At::of_span(m, row.thread);
  Row norm(p, config, at, shared, kept);

  Words<4> x[kVectors];
  const char* const from = Target(p.x, place).row(row.row);
  const uint64_t last = hopper::evict_last_if(config.evict_last);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) x[v] = load_words(from + at.first(v) * sizeof(T), last);
  norm.keep_parameters(place);
  float values[kVectors][kVector];
  const auto unpack = [&] {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) unpack_words<T>(x[v], values[v]);
  };
  if (p.residual.data) {
    norm.add_residual(values, unpack, Target(p.residual, place).row(row.row), place, row.row,
                      row.exists);
  } else {
    unpack();
  }
  norm.finish(values, place, row.row, row.exists, [] {});
  if (config.evict_last && row.row >= config.ordinary_from) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      hopper::evict_as_others(Target(p.x, place).row(row.row) + at.first(v) * sizeof(T));
    }
  }
}

}  // namespace ikbo::norm
