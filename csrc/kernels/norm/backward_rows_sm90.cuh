// The gradients of a norm (backward_sm90.cuh) for interleaved columns (loose.cuh) of rows within
// warps that lie one behind the other, x, grad_y and grad_x of one type and of one place within 16
// bytes, and nothing else. Most odd rows are that.
//
// A warp has a ring of stages of its own, each of a block of rows of x and grad_y. It reads an
// element of each once: both wait for the row's sums in one register. grad_x goes over x, and a
// block leaves as a whole; the stage before it is filled again amid the next block, when its
// results have left.
#pragma once

#include "kernels/norm/backward_sm90.cuh"
#include "kernels/norm/loose.cuh"

namespace ikbo::norm {

// An element of x and of grad_y.
template <class T>
struct Both {
  using Bits = std::conditional_t<sizeof(T) == 2, uint32_t, float2>;
  Bits bits;

  __device__ static Both of(T x, T grad) {
    if constexpr (sizeof(T) == 2) {
      const auto raw = [](const T& value) -> uint32_t {
        return reinterpret_cast<const uint16_t&>(value);
      };
      return {__byte_perm(raw(x), raw(grad), 0x5410)};
    } else {
      return {{x, grad}};
    }
  }
  __device__ float2 values() const {
    if constexpr (sizeof(T) == 2) {
      return unpack<T>(bits);
    } else {
      return bits;
    }
  }
  // The compiler knows nothing of it any more, and keeps it as it is.
  __device__ void hide() {
    if constexpr (sizeof(T) == 2) asm volatile("" : "+r"(bits));
  }
};

// kSums: of grad_y are needed, a LayerNorm's or a bias's. kMost: slots of a lane, at most.
template <class T, int kVectors, int kLanes, bool kSums, int kMost>
__global__ void __launch_bounds__(kBackwardThreads<kVectors, true>, 1)
    norm_backward_rows_sm90(const __grid_constant__ NormBackward p,
                            const __grid_constant__ NormConfig config) {
  using At = LooseColumns<kVectors, 16 / sizeof(T), kLanes, 0, kMost>;
  constexpr int kSlots = At::kSlots;
  constexpr int kAtOnce = 32 / kLanes;  // rows of a warp at once
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ hopper::Barrier barriers[kBackwardRings][NormConfig::kMaxStages];

  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // else it is read from its special register again and again
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int mine = lane / kLanes;
  const At at = At::of_span(config.mapping, 0);
  const uint32_t row_bytes = at.count * sizeof(T);
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  const uint32_t stage_rows = config.rows_per_stage;
  const uint32_t step = config.owners * stage_rows;  // rows from block to block
  char* const ring = shared_bytes + warp * config.stages * config.stage_bytes;
  hopper::Barrier* const full = barriers[warp];
  // In a stage x's block is first, then grad_y's, each behind what is before it within 16 bytes.
  const int grad_offset = config.pitches[0] * stage_rows;
  const char* const all_x = static_cast<const char*>(p.x.data);
  const char* const all_grad = static_cast<const char*>(p.grad_y.data);
  // By lane 0.
  const auto load = [&](int slot, uint32_t first) {
    if (first >= rows) return;
    const uint64_t from = uint64_t{first} * row_bytes;
    const uint32_t bytes = min(stage_rows, rows - first) * row_bytes;
    const int before_x = beyond(all_x + from, 16), before_grad = beyond(all_grad + from, 16);
    const uint32_t x_bytes = (before_x + bytes + 15) & ~15u;
    const uint32_t grad_bytes = (before_grad + bytes + 15) & ~15u;
    char* const stage = ring + slot * config.stage_bytes;
    hopper::arrive_expect_bytes(full[slot], x_bytes + grad_bytes);
    hopper::bulk_load(stage, all_x + from - before_x, x_bytes, full[slot]);
    hopper::bulk_load(stage + grad_offset, all_grad + from - before_grad, grad_bytes, full[slot]);
  };
  uint32_t first = (blockIdx.x + warp * (config.owners / config.rings)) * stage_rows;
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < config.stages; ++s) hopper::init(full[s], 1);
    hopper::fence_barrier_init();
  }
  begin(p, config);
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < config.stages; ++s) load(s, first + s * step);
  }
  __syncwarp();
  // Adding -0 changes nothing, not even the sign of a zero.
  const float weight_offset = p.weight_offset == 0.0f ? -0.0f : p.weight_offset;
  float weight[kSlots];
  with_type<T>(p.weight.type, [&](auto zero) {
    const char* const from = static_cast<const char*>(p.weight.data);
    at.each([&](int s) {
      const float own = from ? at.template load<decltype(zero)>(from, s) : 1.0f;
      weight[s] = own + weight_offset;
    });
  });
  float weight_sums[kSlots] = {};
  float bias_sums[kSlots] = {};

  const bool layer = p.mean != nullptr;
  const float per_column = config.per_column;
  // The statistics of a turn's rows are loaded one turn ahead.
  float next_rstd = 0.0f, next_mean = 0.0f;
  const auto load_statistics = [&](uint32_t row) {
    if (row >= rows) return;
    next_rstd = p.rstd[row];
    if (kSums && layer) next_mean = p.mean[row];
  };
  load_statistics(first + mine);

  int slot = 0;
  uint32_t phase = 0;
  bool is_first = true;
#pragma unroll 1
  for (; first < rows; first += step) {
    const uint64_t from = uint64_t{first} * row_bytes;
    char* const x_rows = ring + slot * config.stage_bytes + beyond(all_x + from, 16);
    const char* const grad_rows =
        ring + slot * config.stage_bytes + grad_offset + beyond(all_grad + from, 16);
    const uint32_t count = min(stage_rows, rows - first);
    const int own = mine * row_bytes + at.first * static_cast<int>(sizeof(T));
    T* x = reinterpret_cast<T*>(x_rows + own);
    const T* grad = reinterpret_cast<const T*>(grad_rows + own);
    hopper::wait(full[slot], phase);
#pragma unroll 1
    for (uint32_t i = 0; i < count; i += kAtOnce) {
      const bool has_row = kAtOnce == 1 || i + mine < count;
      const float rstd = next_rstd, shift = kSums ? -next_mean * rstd : -0.0f;

      Both<T> both[kSlots];
      float2 sums{0.0f, 0.0f};  // of g * xhat and of g
      if (has_row) {
        // All are on their way before the first is used.
        at.each([&](int s) {
          both[s] = at.has(s) ? Both<T>::of(x[s * At::kStep], grad[s * At::kStep])
                              : Both<T>::of(T{}, T{});
        });
        at.each([&](int s) {
          const float2 here = both[s].values();
          const float xhat = kSums ? fmaf(here.x, rstd, shift) : __fmul_rn(here.x, rstd);
          if constexpr (kSums) bias_sums[s] += here.y;
          weight_sums[s] = fmaf(here.y, xhat, weight_sums[s]);
          const float g = __fmul_rn(here.y, weight[s]);
          sums.x = fmaf(g, xhat, sums.x);
          if constexpr (kSums) sums.y += g;
        });
      }
      load_statistics((i + kAtOnce < count ? first + i + kAtOnce : first + step) + mine);
      if (i == 0 && !is_first && lane == 0) {
        // Results of the block before have left its stage.
        hopper::tma_store_wait_read<0>();
        load((slot == 0 ? config.stages : slot) - 1, first + (config.stages - 1) * step);
      }
      __syncwarp();
      if constexpr (kSums) {
        sums = sum_lanes<kLanes>(sums, kLanes);
      } else {
        sums.x = sum_lanes<kLanes>(sums.x, kLanes);
      }
      if (has_row) {
        const GradOfX of{sums, per_column, rstd, shift, layer};
        at.each([&](int s) {
          both[s].hide();
          const float2 here = both[s].values();
          const T value = static_cast<T>(of(here.x, __fmul_rn(here.y, weight[s])));
          if (at.has(s)) x[s * At::kStep] = value;
        });
      }
      x = reinterpret_cast<T*>(reinterpret_cast<char*>(x) + kAtOnce * row_bytes);
      grad = reinterpret_cast<const T*>(reinterpret_cast<const char*>(grad) + kAtOnce * row_bytes);
    }
    __syncwarp();
    // By the thread that stores: for those who have written it would cost a wait.
    if (lane == 0) hopper::fence_shared_for_async();
    store_span<T>(static_cast<char*>(p.grad_x.data) + from, x_rows, count * row_bytes);
    is_first = false;
    if (++slot == config.stages) slot = 0, phase ^= 1;
  }
  hopper::allow_next_kernel();
  if (lane == 0) hopper::tma_store_wait_read<0>();
  const auto add_up = [&](const float (&sums)[kSlots], float* partials) {
    add_up_warps(at, sums, shared_bytes, config.rings, partials + int64_t{blockIdx.x} * at.count);
  };
  if (p.weight_partials) add_up(weight_sums, p.weight_partials);
  if constexpr (kSums) {
    if (config.bias_sums) add_up(bias_sums, p.bias_partials);
  }
}

}  // namespace ikbo::norm
