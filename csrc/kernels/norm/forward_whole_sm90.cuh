// The forwards of rows of whole aligned vectors: a grid has threads for every row, and none of them
// takes a second one. A thread's vectors go from global memory straight into its registers; what
// covers memory's latency is many CTAs an SM, not stages. Of a row in a cluster the CTAs' loads are
// on their way before they meet.
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

// A row's threads meet when sums are exchanged. Here the CTAs of a cluster arrive, so that by then
// all of them run and have set up their barriers.
__device__ inline void arrive_in_cluster(Exchange& shared, int cluster) {
  if (cluster == 1) return;
  if (threadIdx.x == 0) {
    shared.init();
    hopper::fence_barrier_init();
  }
  hopper::cluster_arrive();
}

// As exchange(), of a cluster of two whose parts are the halves of a CTA's warps.
__device__ inline float4 exchange_halves(Exchange& shared, int warps, int half, const float4& part,
                                         const Moments& merge) {
  const int warp = threadIdx.x / 32 - half * warps, lane = threadIdx.x % 32;
  const int width = warps <= 1 ? 1 : 1 << (32 - __clz(warps - 1));
  if (lane == 0) shared.of_warp[half][warp] = part;
  __syncthreads();
  const int peer = lane & (width - 1);
  const float4 nothing{0.0f, 0.0f, 0.0f, 0.0f};
  float4 value = merge(peer < warps ? shared.of_warp[lane / 16][peer] : nothing, width, false);
  const auto add_other = [](float value) {
    return value + __shfl_xor_sync(0xffffffffu, value, 16);
  };
  if (!merge.layer) return {0.0f, add_other(value.y), 0.0f, 0.0f};
  const float mean = __fmul_rn(add_other(value.x), merge.per_column), away = value.w - mean;
  return {0.0f, add_other(fmaf(value.z * away, away, value.y)), 0.0f, mean};
}

// Registers a thread, which decide how many rows an SM works on: 32 warps of those of 4 vectors,
// but where these don't suffice.
template <class T, int kVectors, bool kInWarp, bool kLayer, PlainForm kForm>
constexpr int plain_registers() {
  if (kForm == PlainForm::kEarly) return kVectors > 5 ? 192 : 128;
  if (kVectors > 5) return 128;
  if (kForm == PlainForm::kQuantizes) return kVectors > 4 ? 80 : kVectors > 3 ? 64 : 56;
  if (kForm == PlainForm::kPersistent) return 64;
  if (kVectors == 1) return 32;
  return 32 + 8 * kVectors + (kInWarp && (kLayer || std::is_same_v<T, __half>) ? 8 : 0);
}

__device__ inline Words<4> load_words_once(const char* from) {
  Words<4> w;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
               : "l"(from));
  return w;
}

// x, weight and bias of one type, and y unless it is quantised, as they are; no groups, no
// residual. A row is kept packed and unpacked again in each pass.
//
// Of a row in a cluster of two one CTA may have both parts: its first half of warps the one, its
// second the other, and the same bits.
template <class T, int kVectors, bool kInWarp, bool kLayer, PlainForm kForm>
__global__ void __maxnreg__((plain_registers<T, kVectors, kInWarp, kLayer, kForm>()))
    norm_forward_plain_sm90(const __grid_constant__ NormForward p,
                            const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr bool kEarly = kForm == PlainForm::kEarly;
  constexpr bool kQuantizes = kForm == PlainForm::kQuantizes;
  constexpr bool kPersistent = kForm == PlainForm::kPersistent;
  constexpr bool kMayJoin = !kInWarp && kForm == PlainForm::kUsual;
  using Y = std::conditional_t<kQuantizes, E4m3, T>;
  extern __shared__ __align__(16) char kept[];
  __shared__ Exchange shared;
  const NormMapping& m = config.mapping;
  if constexpr (kPersistent) arrive_in_cluster(shared, m.cluster);
  begin(p, config);
  hopper::allow_next_kernel();

  int rank = 0;
  uint32_t team = blockIdx.x, group = 0;
  if constexpr (kPersistent) {
    rank = hopper::cluster_cta_rank();
    team = hopper::cluster_index();
  } else if (config.groups > 1) {
    group = team % config.groups;
    team /= config.groups;
  }
  const bool joined = kMayJoin && m.cluster == 2;
  WholeRow<kInWarp> row(team, static_cast<uint32_t>(p.rows), m.lanes);
  if (joined && row.thread >= m.lanes) {
    rank = 1;
    row.thread -= m.lanes;
  }

  // Vectors lie `step` bytes from one another, from the first byte of a row that is the thread's.
  const int step = 16 * m.lanes;
  int first = (rank * kVectors * m.lanes + row.thread) * 16;
  Words<4> x[kVectors];
  const auto of_group = [&](const NormMatrix& m) {
    return static_cast<char*>(m.data) + group * m.group_bytes;
  };
  const auto load_x = [&](uint32_t row, int v) {
    const char* const from = of_group(p.x) + row * p.x.row_bytes + first + v * step;
    x[v] = (config.lead & 1) ? load_words_once(from) : load_words<4>(from);
  };
#pragma unroll
  for (int v = 0; v < kVectors; ++v) load_x(row.row, v);
  const KeptVectors<T> kept_weight(kept, 0, kVectors), kept_bias(kept, 1, kVectors);
  const auto load_parameter = [&](const NormMatrix& m, const KeptVectors<T>& kept, int v,
                                  uint32_t absent) {
    if (m.data == nullptr) return Words<4>{absent, absent, absent, absent};
    if constexpr (kPersistent) return kept.words(v);
    return load_words<4>(of_group(m) + (first + v * step));
  };
  // All of them or, later, a vector ahead of the one at hand.
  constexpr int kHeld = kEarly ? kVectors : 1;
  Words<4> weight[kHeld], bias[kHeld];
  const auto load_parameters = [&](int v) {
    weight[v % kHeld] = load_parameter(p.weight, kept_weight, v, kOnes<T>);
    bias[v % kHeld] = load_parameter(p.bias, kept_bias, v, kMinusZeros<T>);
  };
  if constexpr (kEarly) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load_parameters(v);
  }
  if constexpr (kPersistent) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int offset = first + v * step;
      if (p.weight.data) kept_weight.copy(v, static_cast<const char*>(p.weight.data) + offset);
      if (p.bias.data) kept_bias.copy(v, static_cast<const char*>(p.bias.data) + offset);
    }
    hopper::wait_for_copies();  // each thread its own
    hopper::cluster_wait();
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
  uint32_t turn = 0;
#pragma unroll 1
  for (;;) {
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
    if constexpr (!kInWarp) {
      const Moments merge{kLayer, false, config.per_cta_column, config.per_column};
      const float4 part{sum, squares, kPartColumns, mean};
      const float4 whole =
          joined ? exchange_halves(shared, m.warps, rank, part, merge)
                 : exchange(shared, turn, kPersistent ? m.cluster : 1, part, merge, [] {});
      squares = whole.y;
      if constexpr (kLayer) of_row = whole.w, shift = mean - of_row;
    }
    const float rstd = rsqrtf(fmaf(squares, config.per_column, p.eps));
    const bool tells = row.thread == 0 && rank == 0 && row.exists;
    const int64_t index = int64_t{row.row} * config.groups + group;
    if (tells) {
      if (kLayer && p.mean) p.mean[index] = of_row;
      if (p.rstd) p.rstd[index] = rstd;
    }
    shift *= rstd;

    // Addresses are made anew, and not kept in registers.
    asm volatile("" : "+r"(first));
    const uint32_t next_row = row.row + config.owners;
    const bool has_next = kPersistent && next_row < p.rows;
    char* const to = of_group(p.y) + row.row * p.y.row_bytes +
                     first / static_cast<int>(sizeof(T)) * static_cast<int>(sizeof(Y));
    const int to_step = step / static_cast<int>(sizeof(T)) * static_cast<int>(sizeof(Y));
    [[maybe_unused]] float results[kQuantizes ? kVectors : 1][kVector];
    if constexpr (!kEarly) load_parameters(0);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float values[kVector], w[kVector], b[kVector];
      unpack_words<T>(weight[v % kHeld], w);
      unpack_words<T>(bias[v % kHeld], b);
      // No load goes ahead of a store by itself.
      if (!kEarly && v + 1 < kVectors) load_parameters(v + 1);
      values_of(v, values);
      if (has_next) load_x(next_row, v);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        if constexpr (kLayer) values[e] -= mean;
        // Over warps a zero's sign is the sum's, as in ForwardRow.
        values[e] = kInWarp ? values[e] * rstd : fmaf(values[e], rstd, shift);
        values[e] = fmaf(values[e], w[e] + p.weight_offset, b[e]);
        if constexpr (kQuantizes) results[v][e] = values[e];
      }
      if constexpr (!kQuantizes) {
        if (row.exists) store_words<false>(to + v * to_step, pack_words<T>(values));
      }
    }
    if constexpr (kQuantizes) {
      float scale;
      if (p.row_scales) {
        float largest = 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) largest = max_or_nan(largest, fabsf(results[v][e]));
        }
        largest = max_lanes(largest, lanes);
        if constexpr (!kInWarp) {
          largest = exchange(shared, turn, 1, {largest, 0.0f, 0.0f, 0.0f}, Largest{}, [] {}).x;
        }
        scale = scale_of_row(largest);
        if (tells) p.row_scales[index] = scale;
      } else {
        scale = *p.scale;
      }
      const float per_scale = 1.0f / scale;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) results[v][e] *= per_scale;
        if (row.exists) store_words<false>(to + v * to_step, pack_words<E4m3>(results[v]));
      }
    }
    if (!has_next) break;
    row.row = next_row;
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
  using Row = ForwardRow<T, kVectors, kInWarp, true>;
  extern __shared__ __align__(16) char kept[];
  __shared__ Exchange shared;
  const NormMapping& m = config.mapping;
  if constexpr (!kInWarp) arrive_in_cluster(shared, m.cluster);
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
  norm.finish(values, place, row.row, row.exists, [&] {
    if (m.cluster > 1) hopper::cluster_wait();
  });
}

}  // namespace ikbo::norm
