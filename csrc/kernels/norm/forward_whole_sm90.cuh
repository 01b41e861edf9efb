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

// Registers a thread, which decide how many rows an SM works on: 32 warps of those of 4 vectors,
// but where these don't suffice. Where weights are loaded early there are few rows.
template <class T, int kVectors, bool kInWarp, bool kLayer, WholeForm kForm>
constexpr int plain_registers() {
  if (kForm == WholeForm::kEarly) return kVectors > 5 ? 192 : 128;
  if (kVectors > 5) return 128;
  if (kVectors == 1) return 32;
  return 32 + 8 * kVectors + (kInWarp && (kLayer || std::is_same_v<T, __half>) ? 8 : 0);
}

// x, y, a weight and, beside means, a bias of one type, without a residual. Groups, weight_offset
// and other choices of weight and bias are those of kHeads alone. A row is kept packed and unpacked
// again in each pass.
template <class T, int kVectors, bool kInWarp, bool kLayer, WholeForm kForm>
__global__ void __maxnreg__((plain_registers<T, kVectors, kInWarp, kLayer, kForm>()))
    norm_forward_plain_sm90(const __grid_constant__ NormForward p,
                            const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr bool kEarly = kForm == WholeForm::kEarly, kHalves = kForm == WholeForm::kHalves;
  constexpr bool kHeads = kForm == WholeForm::kHeads;
  static_assert(!kLayer || (!kHalves && !kHeads));
  __shared__ Exchange shared;
  const NormMapping& m = config.mapping;
  begin(p, config);
  hopper::allow_next_kernel();
  uint32_t team = blockIdx.x, group = 0;
  if constexpr (kHeads) {
    group = team % config.groups;
    team /= config.groups;
  }
  const WholeRow<kInWarp> row(team, static_cast<uint32_t>(p.rows), m.lanes);
  const int half = kHalves && row.thread >= m.lanes;

  // Vectors lie `step` bytes from one another, from the first byte of a row that is the thread's.
  const int step = 16 * m.lanes;
  int first = (half * (kVectors - 1) * m.lanes + row.thread) * 16;
  const auto data_of = [&](const NormMatrix& m) {
    return static_cast<char*>(m.data) + (kHeads ? group * m.group_bytes : 0);
  };
  const auto row_of = [&](const NormMatrix& m) {
    return data_of(m) + row.row * m.row_bytes + first;
  };
  Words<4> x[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) x[v] = load_words<4>(row_of(p.x) + v * step);
  // Asking whether there is one costs a quarter of all instructions, so that only kHeads does.
  const auto load_parameter = [&](const NormMatrix& m, int v, uint32_t absent) {
    if (kHeads && m.data == nullptr) return Words<4>{absent, absent, absent, absent};
    return load_words<4>(data_of(m) + (first + v * step));
  };
  // All of them or, later, a vector ahead of the one at hand.
  constexpr int kHeld = kEarly ? kVectors : 1;
  constexpr bool kHasBias = kLayer || kHeads;
  Words<4> weight[kHeld], bias[kHeld];
  const auto load_parameters = [&](int v) {
    weight[v % kHeld] = load_parameter(p.weight, v, kOnes<T>);
    if constexpr (kHasBias) bias[v % kHeld] = load_parameter(p.bias, v, kMinusZeros<T>);
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
  const int lanes = kInWarp ? m.lanes : 32;
  constexpr float kPartColumns = 32.0f * kVectors * kVector;  // over warps: of a warp
  float sum = 0.0f, mean = 0.0f;
  if constexpr (kLayer) {
    sum = sum_lanes(sum_over([](float value, float sum) { return sum + value; }), lanes);
    mean = __fmul_rn(sum, kInWarp ? config.per_column : 1.0f / kPartColumns);
  }
  float squares = sum_over([&](float value, float sum) {
    const float away = kLayer ? value - mean : value;
    return fmaf(away, away, sum);
  });
  squares = sum_lanes(squares, lanes);
  float of_row = mean, shift = 0.0f;
  if constexpr (kHalves) {
    squares = exchange_halves(shared, m.warps, half, squares);
  } else if constexpr (!kInWarp) {
    uint32_t turn = 0;
    const Moments merge{kLayer, false, config.per_cta_column, config.per_column};
    const float4 whole =
        exchange(shared, turn, 1, {sum, squares, kPartColumns, mean}, merge, [] {});
    squares = whole.y;
    if constexpr (kLayer) of_row = whole.w, shift = mean - of_row;
  }
  const float rstd = rsqrtf(fmaf(squares, config.per_column, p.eps));
  if (row.thread == 0 && row.exists) {
    const int64_t index = kHeads ? int64_t{row.row} * config.groups + group : row.row;
    if (kLayer && p.mean) p.mean[index] = of_row;
    if (p.rstd) p.rstd[index] = rstd;
  }
  shift *= rstd;

  // Addresses are made anew, and not kept in registers.
  asm volatile("" : "+r"(first));
  char* const to = row_of(p.y);
  if constexpr (!kEarly) load_parameters(0);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float values[kVector], w[kVector], b[kVector];
    unpack_words<T>(weight[v % kHeld], w);
    if constexpr (kHasBias) unpack_words<T>(bias[v % kHeld], b);
    // No load goes ahead of a store by itself.
    if (!kEarly && v + 1 < kVectors) load_parameters(v + 1);
    values_of(v, values);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      if constexpr (kLayer) values[e] -= mean;
      // Over warps a zero's sign is the sum's, as in ForwardRow.
      values[e] = kInWarp ? values[e] * rstd : fmaf(values[e], rstd, shift);
      if constexpr (kHeads) w[e] += p.weight_offset;  // -0 where there is none
      values[e] = kHasBias ? fmaf(values[e], w[e], b[e]) : __fmul_rn(values[e], w[e]);
    }
    if (row.exists) store_words<false>(to + v * step, pack_words<T>(values));
  }
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
#pragma unroll
  for (int v = 0; v < kVectors; ++v) x[v] = load_words<4>(from + at.first(v) * sizeof(T));
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
}

}  // namespace ikbo::norm
