// The gradients of a norm. With g = grad_y * (weight + weight_offset) and xhat = (x - mean) * rstd:
//   grad_x = (g - xhat * mean(g * xhat) [- mean(g): LayerNorm]) * rstd [+ grad_residual_out]
// and, summed over rows, grad_weight = grad_y * xhat and grad_bias = grad_y.
//
// (Products and sums as in the forward: explicitly fused or not.)
//
// kFull: rows of whole vectors, all of x's type. Their x and grad_y wait for the row's sums in
// registers, packed, so that a CTA's stage is filled again right after the row's barrier; the
// others are read from their stage twice. Registers hold the sums over rows of grad_weight, and
// those of grad_bias unless that would cost a second CTA its registers: then they are in shared
// memory, a place for each column slot of each thread. The sums of a CTA or cluster are one row of
// partials, which a second kernel adds up.
#pragma once

#include "hopper/dependent_launch.cuh"
#include "kernels/norm/compiled.h"
#include "kernels/norm/pace.cuh"
#include "kernels/norm/staged.cuh"
#include "kernels/norm/turn_sums.cuh"

namespace ikbo::norm {

inline constexpr int kBackwardRings = 12;

// The compiler knows nothing of them any more.
template <int kCount>
__device__ inline void hide(Words<kCount>& words) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(words.word[i]));
}

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
  // Registers hold the weight of short rows; of longer full ones packed, so it is in T.
  constexpr bool kHoldsWeight = holds_weight(kVectors, kVector, kInWarp);
  constexpr bool kHoldsPacked = kFull && !kHoldsWeight;
  constexpr bool kHoldsBiasSums = kInWarp ? kFull && kVectors <= 3 : kVectors <= 2;
  constexpr bool kHoldsRow = kFull && (kInWarp ? kVectors <= 2 : kVectors != 2);
  constexpr int kWords = kWordsOf<T, kVector>;
  // Short rows are worked on two at a time, whose waits overlap: by a CTA, and where a lane has one
  // vector of a full row.
  constexpr int kMostPaired = !kInWarp ? NormConfig::kPairVectors : kFull ? 1 : 0;
  constexpr int kTurnRows = kVectors <= kMostPaired ? 2 : 1;
  constexpr bool kSharesExchange = !kInWarp && kTurnRows == 2;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Exchange shared;
  constexpr int kRings = kInWarp ? kBackwardRings : 1;
  __shared__ Staged operands[kRings][3];
  __shared__ hopper::Barrier full[kRings][NormConfig::kMaxStages];

  const NormMapping& m = config.mapping;
  const int lane = threadIdx.x % 32, ring_index = kInWarp ? threadIdx.x / 32 : 0;
  const Place place = Place::of_cta<kInWarp>(config);
  const int lanes = kInWarp ? m.lanes : 32;  // of a warp that a row has
  const int mine = kInWarp ? lane >> (__ffs(lanes) - 1) : 0;
  using At = Columns<kVectors, kVector, kInWarp, kFull>;
  const At at = At::of_span(m, kInWarp ? lane & (lanes - 1) : static_cast<int>(threadIdx.x));
  Ring<kInWarp, kFull> ring{
      config,
      static_cast<uint32_t>(p.rows),
      operands[ring_index],
      p.grad_residual_out.data ? 3 : 2,
      (!kInWarp && kTurnRows == 1) ||
          (Staged::touches(p.x, at.count, config) && Staged::touches(p.grad_y, at.count, config) &&
           (!p.grad_residual_out.data || Staged::touches(p.grad_residual_out, at.count, config))),
      shared_bytes + ring_index * config.stages * config.stage_bytes,
      full[ring_index],
      nullptr,
      nullptr,
      place.team + ring_index * (config.owners / config.rings)};
  const bool in_first_warp = kInWarp || threadIdx.x < 32;
  if (in_first_warp) {
    if (lane < config.stages) hopper::init(full[ring_index][lane], 1);
    if (lane == 0) {
      lay_out(operands[ring_index], place, at.count, config, p.x, p.grad_y, p.grad_residual_out);
      if constexpr (!kInWarp) shared.init();
    }
    hopper::fence_barrier_init();
    __syncwarp();
  }
  begin(p, config);
  if (p.apart) hopper::allow_next_kernel();
  if (kInWarp || threadIdx.x == 0) ring.load_first();
  meet<kInWarp>(place);

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
  Words<kWords> packed_weight[kHoldsPacked ? kVectors : 1];
  float weight_sums[kVectors][kVector] = {};
  float held_bias_sums[kHoldsBiasSums ? kVectors : 1][kVector] = {};
  const Slots<kVector> bias_sums{reinterpret_cast<float4*>(shared_bytes + config.ring_bytes()),
                                 at.vectors};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!at.has(v)) continue;
    if constexpr (kHoldsWeight) load_weight(at, v, held_weight[v]);
    if constexpr (kHoldsPacked) {
      float ones[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) ones[e] = 1.0f;
      packed_weight[v] = pack_words<T>(ones);
      if (p.weight.data) {
        packed_weight[v] = load_words<kWords>(weight.data + at.first(v) * sizeof(T));
      }
    }
    if (!kHoldsBiasSums && config.bias_sums) {
      const float zeros[kVector] = {};
      bias_sums.put(v, zeros);
    }
  }

  // Of full rows: this thread's first vector in a row, from there to its others, and where grad_x's
  // are. The compiler knows nothing of that: it would compute it again for each row, in three times
  // as many instructions. (Where a CTA's rows take all registers, it does.)
  constexpr bool kHoldsAddress = kFull && (kInWarp || kVectors <= 2);
  const int begin = at.first(0) * static_cast<int>(sizeof(T));
  const int step = at.lanes * kVector * static_cast<int>(sizeof(T));
  [[maybe_unused]] char* first_grad_x = grad_x.data + begin;
  if constexpr (kHoldsAddress) asm volatile("" : "+l"(first_grad_x));

  const bool layer = p.mean != nullptr;
  const float per_column = 1.0f / static_cast<float>(m.columns);
  const int at_once = config.at_once;          // a CTA's 2 or 1
  const int row_step = kInWarp ? at_once : 1;  // of a turn
  const int turn_step = kInWarp ? kTurnRows * at_once : at_once;
  uint32_t turn = 0;

  // The statistics of a turn's rows are loaded one turn ahead. Of a CTA's two rows lane 2 r has
  // rstd of row r, and lane 2 r + 1 the mean: one load.
  constexpr int kRowUnroll = kFull ? kTurnRows : 1;
  float next_rstd[kTurnRows] = {}, next_mean[kTurnRows] = {}, next_statistic = 0.0f;
  const auto load_statistics = [&](uint32_t first) {
    // A product of unsigned words is one instruction; four vectors of a CTA's row lack its
    // registers.
    using Number = std::conditional_t<(kInWarp || kVectors < 4), uint32_t, int>;
    const auto place_of = [&](uint32_t row) {
      return uint64_t{row} * static_cast<Number>(config.groups) + static_cast<Number>(place.group);
    };
    if constexpr (kSharesExchange) {
      const uint32_t row = first + lane / 2;
      if (row < ring.rows && lane < 2 * at_once && (lane % 2 == 0 || layer)) {
        next_statistic = (lane % 2 == 0 ? p.rstd : p.mean)[place_of(row)];
      }
    } else {
#pragma unroll
      for (int r = 0; r < kTurnRows; ++r) {
        const uint32_t row = first + r * row_step;
        if (row >= ring.rows) continue;
        const uint64_t of_row = place_of(row);
        next_rstd[r] = p.rstd[of_row];
        if (layer) next_mean[r] = p.mean[of_row];
      }
    }
  };
  load_statistics(ring.first_row() + mine);

  // Where an operand's rows lie in a stage: as in Staged, but in registers.
  [[maybe_unused]] int offsets[3], steps[3];
#pragma unroll
  for (int o = 0; o < 3; ++o) {
    const NormMatrix& operand = o == 0 ? p.x : o == 1 ? p.grad_y : p.grad_residual_out;
    offsets[o] = o == 0 ? 0 : offsets[o - 1] + config.pitches[o - 1] * config.rows_per_stage;
    steps[o] = Staged::touches(operand, at.count, config) ? at.count * static_cast<int>(sizeof(T))
                                                          : config.pitches[o];
  }

  // A CTA's stage is filled again after the row's barrier, or after that of the row behind it where
  // it is still read then.
  const bool refills_late = !kHoldsRow || p.grad_residual_out.data;
  uint32_t turns_seen = 0;
  const auto refill = [&] {
    if (threadIdx.x != blockDim.x - 32) return;
    if (kTurnRows == 1 && config.lead > 0) {
      turns_seen =
          keep_pace(p.turns, config.lead, place.rank == 0, turn, config.owners, turns_seen);
    }
    if (refills_late && turn == 1) return;
    const int before = ring.slot == 0 ? config.stages - 1 : ring.slot - 1;
    ring.load_again(refills_late ? before : ring.slot,
                    refills_late ? ring.block - config.owners : ring.block);
  };

  while (ring.wait()) {
    const uint32_t first_row = ring.first_row();
    const int count = ring.rows_from(first_row);
#pragma unroll 1
    for (int i = 0; i < (kSharesExchange ? 1 : count); i += turn_step) {
      const bool has_row = !kInWarp || i + mine < count;
      const int in_stage = has_row ? i + mine : i;
      const auto there = [&](int r) {
        return kInWarp ? i + mine + r * at_once < count : r < count;
      };
      float mean[kTurnRows], rstd[kTurnRows];
#pragma unroll
      for (int r = 0; r < kTurnRows; ++r) {
        const auto of = [&](int from) { return __shfl_sync(0xffffffffu, next_statistic, from); };
        rstd[r] = kSharesExchange ? of(2 * r) : next_rstd[r];
        mean[r] = kSharesExchange ? of(2 * r + 1) : next_mean[r];
      }
      load_statistics(!kSharesExchange && i + turn_step < count
                          ? first_row + i + turn_step + mine
                          : first_row + config.owners * config.rows_per_stage + mine);

      // Row r of the turn, of operand o.
      const auto in_stage_of = [&](int o, int r) -> const char* {
        if constexpr (kFull) {
          return ring.stage() + offsets[o] +
                 (!kInWarp && kTurnRows == 1 ? 0 : (in_stage + r * row_step) * steps[o]);
        } else {
          return operands[ring_index][o].template in_stage<kFull>(ring.stage(), first_row,
                                                                  in_stage + r);
        }
      };
      // Of a full row this thread's first vector.
      const auto first_of = [&](int o, int r) { return in_stage_of(o, r) + begin; };
      Words<kWords> x_words[kTurnRows][kHoldsRow ? kVectors : 1];
      Words<kWords> grad_words[kTurnRows][kHoldsRow ? kVectors : 1];
      if constexpr (kHoldsRow) {
#pragma unroll
        for (int r = 0; r < kTurnRows; ++r) {
          const char* const x = first_of(0, r);
          const char* const grad = first_of(1, r);
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            x_words[r][v] = grad_words[r][v] = Words<kWords>{};
            if (there(r)) {
              x_words[r][v] = load_words<kWords>(x + v * step);
              grad_words[r][v] = load_words<kWords>(grad + v * step);
            }
          }
        }
      }
      // Vector v of x and of grad_y. The first two: first_of().
      constexpr bool kReadsAgain = kFull && kInWarp && !kHoldsRow;
      const auto load = [&](const char* first_x, const char* first_grad, const At& now, int r,
                            int v, float (&x)[kVector], float (&grad)[kVector]) {
        if constexpr (kHoldsRow) {
          unpack_words<T>(x_words[r][v], x);
          unpack_words<T>(grad_words[r][v], grad);
        } else if constexpr (kReadsAgain) {
          unpack_words<T>(load_words<kWords>(first_x + v * step), x);
          unpack_words<T>(load_words<kWords>(first_grad + v * step), grad);
        } else {
          now.template load<T>(in_stage_of(0, r), v, x);
          const auto load_grad = [&](auto zero) {
            now.template load<decltype(zero)>(in_stage_of(1, r), v, grad);
          };
          if constexpr (kFull) {
            load_grad(T{});
          } else {
            with_type<T>(p.grad_y.type, load_grad);
          }
        }
      };
      // grad_y becomes g.
      const auto weigh = [&](const At& now, int v, float (&grad)[kVector]) {
        float w[kVector];
        if constexpr (kHoldsWeight) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) w[e] = held_weight[v][e];
        } else if constexpr (kHoldsPacked) {
          unpack_words<T>(packed_weight[v], w);
        } else {
          load_weight(now, v, w);
        }
#pragma unroll
        for (int e = 0; e < kVector; ++e) grad[e] = __fmul_rn(grad[e], w[e]);
      };

      // Of row r, in a loop that isn't unrolled.
      const auto of_row = [](const float (&values)[kTurnRows], int r) {
        return r == 0 ? values[0] : values[kTurnRows - 1];
      };
      float4 sums{0.0f, 0.0f, 0.0f, 0.0f};  // as in TurnSums
      // An RMSNorm's rows without a bias have no sums of grad_y: a loop of their own, an eighth
      // shorter.
      const auto first_pass = [&](auto alone) {
#pragma unroll kRowUnroll
        for (int r = 0; r < kTurnRows; ++r) {
          if (!kHoldsRow && !there(r)) continue;
          const At now = kHoldsRow ? at : at.recomputed();
          const float row_rstd = of_row(rstd, r), shift = -of_row(mean, r) * row_rstd;
          float along = 0.0f, sum = 0.0f;
          const char* const first_x = kReadsAgain ? first_of(0, r) : nullptr;
          const char* const first_grad = kReadsAgain ? first_of(1, r) : nullptr;
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (!now.has(v)) continue;
            float xhat[kVector], grad[kVector];
            load(first_x, first_grad, now, r, v, xhat, grad);
            if constexpr (alone) {
              // No sums of grad_y.
            } else if constexpr (kHoldsBiasSums) {
#pragma unroll
              for (int e = 0; e < kVector; ++e) held_bias_sums[v][e] += grad[e];
            } else if (config.bias_sums) {
              bias_sums.add(v, grad);
            }
#pragma unroll
            for (int e = 0; e < kVector; ++e) {
              xhat[e] = fmaf(xhat[e], row_rstd, shift);
              weight_sums[v][e] = fmaf(grad[e], xhat[e], weight_sums[v][e]);
            }
            weigh(now, v, grad);
#pragma unroll
            for (int e = 0; e < kVector; ++e) {
              along = fmaf(grad[e], xhat[e], along);
              if constexpr (!alone) sum += grad[e];
            }
          }
          if (r == 0) {
            sums.x = along, sums.y = sum;
          } else {
            sums.z = along, sums.w = sum;
          }
        }
      };
      if constexpr (kFull && (kInWarp || kVectors <= 2)) {
        if (layer || config.bias_sums) {
          first_pass(std::false_type{});
        } else {
          first_pass(std::true_type{});
        }
      } else {
        first_pass(std::false_type{});
      }
      const bool pair = kTurnRows == 2 && i + row_step < count;
      const TurnSums merge{layer, pair};
      if constexpr (kSharesExchange) {
        sums = exchange_pair(shared, turn, place.cluster, sums, merge, refill);
      } else {
        if (kTurnRows == 2 && pair && layer && lanes == 32) {
          const float each = sum_each(sums);
          const auto value = [&](int i) { return __shfl_sync(0xffffffffu, each, 8 * i); };
          sums = {value(0), value(1), value(2), value(3)};
        } else {
          sums = merge.over<32>(sums, lanes);
        }
        if constexpr (!kInWarp) {
          sums = exchange(shared, turn, place.cluster, sums, merge, refill);
        }
      }

      // Else the compiler would keep what it has unpacked, in registers that there aren't.
      if constexpr (!kHoldsRow) {
        asm volatile("" ::: "memory");
      } else if constexpr (kVectors > 2) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int r = 0; r < kTurnRows; ++r) hide(x_words[r][v]), hide(grad_words[r][v]);
          if constexpr (kHoldsPacked) hide(packed_weight[v]);
        }
      }
#pragma unroll kRowUnroll
      for (int r = 0; r < kTurnRows; ++r) {
        if ((kFull || !kInWarp) && !there(r)) continue;
        const At now = at.recomputed();
        const uint32_t number = first_row + in_stage + r * row_step;
        // grad_x = g * rstd + x * slope + offset
        const float row_rstd = of_row(rstd, r), shift = -of_row(mean, r) * row_rstd;
        const float row_along = (r == 0 ? sums.x : sums.z) * per_column;
        const float row_sum = layer ? (r == 0 ? sums.y : sums.w) * per_column : 0.0f;
        const float slope = -row_along * row_rstd * row_rstd;
        const float offset = -fmaf(row_along, shift, row_sum) * row_rstd;
        [[maybe_unused]] StoreState x_state{}, residual_state{};
        const char* const first_x = kReadsAgain ? first_of(0, r) : nullptr;
        const char* const first_grad = kReadsAgain ? first_of(1, r) : nullptr;
        [[maybe_unused]] char* const to = first_grad_x + number * grad_x.row_bytes;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (!now.has(v)) continue;
          float x[kVector], grad[kVector];
          load(first_x, first_grad, now, r, v, x, grad);
          weigh(now, v, grad);
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            grad[e] = fmaf(x[e], slope, fmaf(grad[e], row_rstd, offset));
          }
          if (p.grad_residual_out.data) {
            const auto add = [&](auto zero) {
              float added[kVector];
              now.template load<decltype(zero)>(in_stage_of(2, r), v, added);
#pragma unroll
              for (int e = 0; e < kVector; ++e) grad[e] += added[e];
            };
            if constexpr (kFull) {
              add(T{});
            } else {
              with_type<T>(p.grad_residual_out.type, add);
            }
          }
          if constexpr (kHoldsAddress) {
            if (p.grad_x.data) store_words(to + v * step, pack_words<T>(grad));
          } else if constexpr (kFull) {
            if (p.grad_x.data) now.template store<T>(grad_x.row(number), v, grad, true, x_state);
          } else {
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
    }
    if constexpr (kInWarp) {
      __syncwarp();
      ring.load_again(ring.slot, ring.block);
    }
    ring.advance();
  }
  hopper::allow_next_kernel();

  if (p.weight_partials || config.bias_sums) {
    const int64_t partial =
        (int64_t{place.team} * config.groups + place.group) * m.columns + place.first_column;
    if constexpr (kInWarp) {
      const At now = at.recomputed();
      const Slots<kVector> slots{reinterpret_cast<float4*>(shared_bytes), at.vectors};
      const auto put = [&](const Slots<kVector>& slots, const float (&sums)[kVectors][kVector]) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (now.has(v)) slots.put(v, sums[v]);
        }
      };
      const auto add_up = [&](const Slots<kVector>& slots, float* partials) {
        for (int column = threadIdx.x; column < now.count; column += blockDim.x) {
          partials[partial + column] = slots.sum_of_column(column, m.lanes);
        }
      };
      if constexpr (kHoldsBiasSums) {
        if (config.bias_sums) put(bias_sums, held_bias_sums);
      }
      __syncthreads();  // all stages are read
      put(slots, weight_sums);
      __syncthreads();
      if (p.weight_partials) add_up(slots, p.weight_partials);
      if (config.bias_sums) add_up(bias_sums, p.bias_partials);
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!at.has(v)) continue;
        float bias[kVector];
        if constexpr (kHoldsBiasSums) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) bias[e] = held_bias_sums[v][e];
        } else if (config.bias_sums) {
          bias_sums.get(v, bias);
        }
        if constexpr (kFull) {
          const auto put = [&](float* partials, const float (&values)[kVector]) {
#pragma unroll
            for (int e = 0; e < kVector; e += 4) {
              *reinterpret_cast<float4*>(partials + partial + at.first(v) + e) =
                  float4{values[e], values[e + 1], values[e + 2], values[e + 3]};
            }
          };
          if (p.weight_partials) put(p.weight_partials, weight_sums[v]);
          if (config.bias_sums) put(p.bias_partials, bias);
        } else {
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            if (p.weight_partials) p.weight_partials[partial + at.first(v) + e] = weight_sums[v][e];
            if (config.bias_sums) p.bias_partials[partial + at.first(v) + e] = bias[e];
          }
        }
      }
    }
  }
  if (place.cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
