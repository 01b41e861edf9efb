// The forward for rows over three warps and more, alone or in a cluster, of 3 or 4 whole aligned
// vectors a thread, all of one type or quantised, without a residual. The same bits as
// norm_forward_sm90's.
//
// There all warps of a CTA wait while a row's sums are exchanged. Here two rows overlap: the warps
// take the sums of the row ahead before they finish a row, which waits packed in their registers.
// One warp more exchanges the sums, and refills the ring.
//
//   of a row  warps:     wait full[stage], read it, sums -> of_warp, arrive partial[b]
//             exchanger: wait partial[b], merge, st.async to the cluster's CTAs; wait ready[b],
//                        merge, mean and rstd -> result[b], arrive done[b]; refill the stage
//             warps:     (sums of the row ahead) wait done[b], y
//
// Of what `b` numbers there are two. Written for row r + 2, they have been read for row r: a warp's
// sums of r + 2 follow its wait for done of r; the exchanger's result of r + 2 follows the sums of
// r + 2 by all warps; and a CTA's sums of r + 2 are sent after all CTAs have sent those of r + 1,
// so they have merged those of r.
#pragma once

#include "kernels/norm/forward_sm90.cuh"

namespace ikbo::norm {

// An SM's: four CTAs of 4 warps and the exchanger, or one of 16. Their 96 registers allow no more.
inline constexpr int kOverlappedThreads = 640;

struct OverlappedExchange {
  float4 of_warp[2][kMaxWarps];
  float4 of_cta[2][kMaxWarps];
  float4 result[2];  // mean, rstd, 1 / scale; or, where rows are scaled early, 0, rstd / scale, 1
  hopper::Barrier partial[2], ready[2], done[2];

  __device__ void init(int warps) {
    for (int b = 0; b < 2; ++b) {
      hopper::init(partial[b], warps);
      hopper::init(ready[b], 1);
      hopper::init(done[b], 1);
    }
  }

  // The exchanging warp: the sums of a turn's row over warps and CTAs, once they are there, in all
  // of its lanes.
  __device__ float4 sums(uint32_t b, uint32_t phase, const Moments& merge, int warps, int lane,
                         const Place& place) {
    const int width = 1 << (32 - __clz(warps - 1));
    const int peer = lane & (width - 1);
    hopper::wait(partial[b], phase);
    const float4 nothing{0.0f, 0.0f, 0.0f, 0.0f};
    float4 all = merge(peer < warps ? of_warp[b][peer] : nothing, width, false);
    if (place.cluster > 1) {
      if (lane == 0) hopper::arrive_expect_bytes(ready[b], sizeof(float4) * place.cluster);
      if (lane < place.cluster) {
        hopper::store_async_in_cluster(&of_cta[b][place.rank], ready[b], lane, all);
      }
      __syncwarp();
      hopper::wait(ready[b], phase);
      all = merge(of_cta[b][lane & (place.cluster - 1)], place.cluster, true);
    }
    return all;
  }
};

template <class T, int kVectors>
__global__ void __launch_bounds__(kOverlappedThreads, 1)
    norm_forward_overlapped_sm90(const __grid_constant__ NormForward p,
                                 const __grid_constant__ NormConfig config) {
  constexpr int kVector = 16 / sizeof(T), kWords = 4;
  using At = Columns<kVectors, kVector, false, true>;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ OverlappedExchange shared;
  __shared__ Staged operand;
  __shared__ hopper::Barrier full[NormConfig::kMaxStages];
  __shared__ uint32_t drawn[NormConfig::kMaxStages];

  const NormMapping& m = config.mapping;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool exchanges = warp == m.warps;
  const Place place = Place::of_cta<false>(config);
  const At at = At::of_span(m, static_cast<int>(threadIdx.x));
  Ring<false, true> ring{
      config, static_cast<uint32_t>(p.rows),         &operand, 1,         true, shared_bytes,
      full,   place.rank == 0 ? p.counter : nullptr, drawn,    place.team};
  if (exchanges) {
    if (lane < config.stages) hopper::init(full[lane], 1);
    if (lane == 0) {
      lay_out(&operand, place, at.count, config, p.x);
      shared.init(m.warps);
    }
    hopper::fence_barrier_init();
    __syncwarp();
  }
  begin(p, config);
  hopper::allow_next_kernel();
  if (exchanges && lane == 0) ring.load_first();
  __syncwarp();
  meet<false>(place);

  if (exchanges) {
    const float per_column = 1.0f / static_cast<float>(m.columns);
    const Moments merge{p.layer, scales_early(p), 1.0f / static_cast<float>(at.count), per_column};
    float scale = p.scale ? *p.scale : 1.0f;
#pragma unroll 1
    for (uint32_t turn = 0; ring.wait(); ++turn) {
      const uint32_t b = turn & 1;
      const float4 sums = shared.sums(b, turn >> 1 & 1, merge, m.warps, lane, place);
      if (lane == 0) {
        const float rstd = rsqrtf(fmaf(sums.y, per_column, p.eps));
        if (p.row_scales) scale = scale_of_row(sums.x * rstd);
        shared.result[b] = p.row_scales ? float4{0.0f, scaled_root(rstd, scale), 1.0f, 0.0f}
                                        : float4{sums.w, rstd, 1.0f / scale, 0.0f};
        hopper::arrive(shared.done[b]);
        ring.load_again(ring.slot, ring.block);
        if (place.rank == 0) {
          const int64_t of_row = int64_t{ring.first_row()} * config.groups + place.group;
          if (p.mean) p.mean[of_row] = sums.w;
          if (p.rstd) p.rstd[of_row] = rstd;
          if (p.row_scales) p.row_scales[of_row] = scale;
        }
      }
      __syncwarp();
      ring.advance();
    }
  } else {
    const KeptVectors<T> weight{shared_bytes + config.ring_bytes(), 0, kVectors};
    const KeptVectors<T> bias{shared_bytes + config.ring_bytes(), 1, kVectors};
    const auto keep = [&](const KeptVectors<T>& kept, const NormMatrix& from) {
      if (from.data == nullptr) return;
      const char* const data = Target(from, place).data;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        kept.copy(v, data + at.first(v) * sizeof(T));
      }
    };
    keep(weight, p.weight);
    keep(bias, p.bias);
    hopper::wait_for_copies();
    const Target y(p.y, place, p.quantizes() ? 1 : sizeof(T));
    constexpr float kPartColumns = 32.0f * kVectors * kVector;

    // The row ahead, and the one whose sums are exchanged meanwhile.
    Words<kWords> next[kVectors], words[kVectors];
    float next_mean = 0.0f, part_mean = 0.0f;  // of this warp's columns
    uint32_t row = 0;
    const int step = m.lanes * kVector * static_cast<int>(sizeof(T));
    const auto weight_of = [&](int v, float (&w)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) w[e] = 1.0f;
      if (p.weight.data) weight.get(v, w);
      if (p.weight_offset != 0.0f) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) w[e] += p.weight_offset;
      }
    };

    // A weight, and beside means, and only there, a bias.
    const bool is_usual =
        p.weight.data && p.weight_offset == 0.0f && p.layer == (p.bias.data != nullptr);

    // To the shared memory of `buffer`, and to the exchanger.
    const auto take_sums = [&](uint32_t buffer) {
      const char* const x = ring.stage() + at.first(0) * sizeof(T);
      float values[kVectors][kVector];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) next[v] = load_words<kWords>(x + v * step);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) unpack_words<T>(next[v], values[v]);
      float sum = 0.0f;
      if (p.layer) {
        sum = sum_of_elements(values, [](float value, float sum) { return sum + value; });
        sum = sum_lanes(sum, 32);
        next_mean = __fmul_rn(sum, 1.0f / kPartColumns);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) values[v][e] -= next_mean;
        }
      }
      float squares =
          sum_of_elements(values, [](float value, float sum) { return fmaf(value, value, sum); });
      squares = sum_lanes(squares, 32);
      if (p.row_scales) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          float w[kVector];
          if (is_usual) {
            weight.get(v, w);
          } else {
            weight_of(v, w);
          }
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            sum = max_or_nan(sum, fabsf(__fmul_rn(values[v][e], w[e])));
          }
        }
        sum = max_lanes(sum, 32);
      }
      __syncwarp();  // all have read the stage, and the result of two rows ago
      if (lane == 0) {
        shared.of_warp[buffer][warp] = float4{sum, squares, kPartColumns, next_mean};
        hopper::arrive(shared.partial[buffer]);
      }
    };
    // y of the row in `words`. With the usual parameters no choice is left to each vector.
    const auto finish = [&](float4 result, auto usual, bool layer, auto quantizes, auto early) {
      using U = std::conditional_t<quantizes, E4m3, T>;
      const float rstd = result.y, shift = (part_mean - result.x) * rstd;
      char* const to = y.row(row) + at.first(0) * sizeof(U);
      const int to_step = m.lanes * kVector * static_cast<int>(sizeof(U));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float values[kVector], w[kVector], b[kVector];
        unpack_words<T>(words[v], values);
        if (layer) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) values[e] -= part_mean;
        }
#pragma unroll
        for (int e = 0; e < kVector; ++e) b[e] = -0.0f;
        if constexpr (usual) {
          weight.get(v, w);
        } else {
          weight_of(v, w);
        }
        if (usual ? layer : p.bias.data != nullptr) bias.get(v, b);
        if (early || (quantizes && p.row_scales)) {
          // As ForwardRow.
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            values[e] = __fmul_rn(__fmul_rn(values[e], w[e]), rstd);
          }
        } else {
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            values[e] = fmaf(values[e], rstd, shift);
            values[e] = fmaf(values[e], w[e], b[e]);
            if constexpr (quantizes) values[e] *= result.z;
          }
        }
        store_words(to + v * to_step, pack_words<U>(values));
      }
    };
#pragma unroll 1
    for (uint32_t turn = 0;; ++turn) {
      const bool has_next = ring.wait();
      if (has_next) take_sums(turn & 1);
      if (turn > 0) {
        const uint32_t before = turn - 1;
        hopper::wait(shared.done[before & 1], before >> 1 & 1);
        const float4 result = shared.result[before & 1];
        constexpr std::true_type yes;
        constexpr std::false_type no;
        if (p.quantizes()) {
          if (is_usual && p.row_scales) {
            finish(result, yes, false, yes, yes);
          } else {
            finish(result, no, p.layer, yes, no);
          }
        } else if (!is_usual) {
          finish(result, no, p.layer, no, no);
        } else if (p.layer) {
          finish(result, yes, true, no, no);
        } else {
          finish(result, yes, false, no, no);
        }
      }
      if (!has_next) break;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) words[v] = next[v];
      part_mean = next_mean;
      row = ring.first_row();
      ring.advance();
    }
  }
  __syncwarp();
  if (place.cluster > 1) hopper::cluster_sync();
}

}  // namespace ikbo::norm
