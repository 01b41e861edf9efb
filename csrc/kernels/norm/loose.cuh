// Rows that leave some of their threads' slots without a column: how a thread reads and writes its
// columns, one element at a time. A row of any length at any address costs the same.
#pragma once

#include "hopper/bulk_copy.cuh"
#include "hopper/tma.cuh"
#include "kernels/norm/staged.cuh"

namespace ikbo::norm {

// A thread's columns of a CTA's span: NormMapping::column() on the device, where `interleaved`.
// Neighbouring lanes have neighbouring columns, which takes a bank of shared memory each two of
// them, whatever a row's length. kLanes: of a warp that a row has; 0: it has all of a CTA's warps.
// Of kSlots a warp takes those that one of its lanes has a column for: all kSure first ones have.
template <int kVectors, int kVector, int kLanes, int kSureOverWarps = kVectors / 2 * kVector,
          int kMost = kVectors * kVector>
struct LooseColumns {
  static constexpr bool kInWarp = kLanes > 0;
  static constexpr int kStep = kInWarp ? kLanes : 32;  // from slot to slot
  static constexpr int kSlots = kMost;
  static constexpr int kSure = kInWarp ? (kVectors - 1) * kVector : kSureOverWarps;
  int count;    // columns of the span
  int columns;  // of the warp's part of it
  int first;    // this thread's, in the span
  int slots, mine;

  __device__ static LooseColumns of_span(const NormMapping& m, int64_t first_column) {
    LooseColumns at;
    at.count = static_cast<int>(min(m.cta_columns, m.columns - first_column));
    const int warp = kInWarp ? 0 : threadIdx.x / 32, lane = threadIdx.x % kStep;
    // count * warp / m.warps: so far from the next whole number that a float knows it.
    const auto begin_of = [&](int warp, float per_warp) {
      return static_cast<int>((static_cast<float>(at.count * warp) + 0.5f) * per_warp);
    };
    const float per_warp = kInWarp ? 0.0f : __fdividef(1.0f, static_cast<float>(m.warps));
    const int begin = kInWarp ? 0 : begin_of(warp, per_warp);
    at.columns = kInWarp ? at.count : begin_of(warp + 1, per_warp) - begin;
    at.first = begin + lane;
    at.slots = (at.columns + kStep - 1) / kStep;
    at.mine = (at.columns - lane + kStep - 1) / kStep;
    return at;
  }

  // body(slot) for each slot, by all of a warp's threads. Beyond the sure ones in groups of 1, 1,
  // 2, 4 and 8, each behind a branch that a warp takes as one.
  template <class Body>
  __device__ void each(const Body& body) const {
#pragma unroll
    for (int i = 0; i < kSure; ++i) body(i);
    each_from<kSure>(body);
  }
  __device__ bool has(int slot) const { return slot < kSure || slot < mine; }
  // Of a row whose span begins at `row`. Zero where there is no column.
  template <class T>
  __device__ float load(const char* row, int slot) const {
    const T* const from = reinterpret_cast<const T*>(row) + first;
    return has(slot) ? static_cast<float>(from[slot * kStep]) : 0.0f;
  }
  // The same of shared memory that goes on behind the row, for as many steps as each() takes at
  // once.
  template <class T>
  __device__ float load_padded(const char* row, int slot) const {
    const float value = static_cast<float>((reinterpret_cast<const T*>(row) + first)[slot * kStep]);
    return has(slot) ? value : 0.0f;
  }
  // And of anywhere: the row's first column where there is none.
  template <class T>
  __device__ T load_any(const char* row, int slot) const {
    const T* const from = reinterpret_cast<const T*>(row);
    return *(has(slot) ? from + first + slot * kStep : from);
  }
  template <class T>
  __device__ void store(char* row, int slot, T value) const {
    T* const to = reinterpret_cast<T*>(row) + first;
    if (has(slot)) to[slot * kStep] = value;
  }

 private:
  template <int kFrom, class Body>
  __device__ void each_from(const Body& body) const {
    if constexpr (kFrom < kSlots) {
      constexpr int kSize = kFrom == kSure ? 1 : kFrom - kSure;
      constexpr int kTo = kFrom + kSize < kSlots ? kFrom + kSize : kSlots;
      if (slots > kFrom) {
#pragma unroll
        for (int i = kFrom; i < kTo; ++i) body(i);
        each_from<kTo>(body);
      }
    }
  }
};

// Whether results of x's type may be written over x in its stage, and its rows stored from there at
// once: they have to lie in memory as x's do.
__device__ inline bool lies_as(const NormMatrix& y, const NormMatrix& x, const Place& at,
                               int columns, const NormConfig& config) {
  const auto from = [&](const NormMatrix& m) {
    return reinterpret_cast<uintptr_t>(Target(m, at).data);
  };
  return y.type == x.type && Staged::touches(x, columns, config) &&
         Staged::touches(y, columns, config) && (from(y) - from(x)) % 16 == 0 &&
         (y.row_bytes - x.row_bytes) % 16 == 0;
}

// By a warp: stores a span of shared memory, which its threads see, to a place of the same address
// modulo 16. The copy engine takes the whole pieces of 16 bytes, and lanes what is before and
// behind. Lane 0 closes its group.
template <class T>
__device__ inline void store_span(char* to, const char* from, int bytes) {
  constexpr int kSize = sizeof(T);
  const int lane = threadIdx.x % 32;
  const int head = min((16 - beyond(to, 16)) & 15, bytes);
  const int body = max(bytes - head - beyond(to + bytes, 16), 0);
  if (lane == 0) {
    if (body > 0) hopper::bulk_store(to + head, from + head, body);
    hopper::tma_store_commit();
  }
  int at = lane * kSize;
  if (at >= head) at += body;
  if (at < bytes) {
    *reinterpret_cast<T*>(to + at) = *reinterpret_cast<const T*>(from + at);
  }
}

// Results on their way from stages to memory, over x. `in_place`: else they are stored by
// themselves.
template <class T, bool kInWarp>
struct Outlet {
  Ring<kInWarp, false>& ring;
  const Staged& x;
  const NormMatrix& y;
  const Place& place;
  bool in_place;

  __device__ int before(int slot) const { return (slot == 0 ? ring.config.stages : slot) - 1; }
  // Of a block. By a warp, when all have written theirs and it knows of it.
  __device__ void store(int slot, uint32_t block) const {
    const uint32_t first = block * ring.config.rows_per_stage;
    const char* const stage = ring.bytes + slot * ring.config.stage_bytes;
    // By the thread that stores: for those who have written it would cost a wait.
    if (threadIdx.x % 32 == 0) hopper::fence_shared_for_async();
    store_span<T>(Target(y, place.recomputed(ring.config)).row(first),
                  x.template in_stage<false>(stage, first, 0), ring.rows_from(first) * x.row_bytes);
  }
  // The same, when all have done with the stage; and loads another block: in place, into the stage
  // that the block before has left, which the first one doesn't find.
  __device__ void renew(int slot, uint32_t block, bool is_first) const {
    const bool is_loader = kInWarp || threadIdx.x % 32 == 0;
    if (!in_place) {
      if (is_loader) ring.load_again(slot, block);
      return;
    }
    store(slot, block);
    if (is_first) return;
    if (threadIdx.x % 32 == 0) hopper::tma_store_wait_read<1>();
    if (is_loader) ring.load_again(before(slot), block - ring.config.owners);
  }
  // All results have left their stages.
  __device__ void finish() const {
    if (in_place && threadIdx.x % 32 == 0) hopper::tma_store_wait_read<0>();
  }
};

// A row's grad_x = g * rstd + xhat * slope + offset, of x itself; sums: of g * xhat and of g.
struct GradOfX {
  float slope, rstd, offset;

  __device__ GradOfX(float2 sums, float per_column, float rstd_, float shift, bool layer)
      : rstd(rstd_) {
    const float of_xhat = -sums.x * per_column * rstd;
    slope = of_xhat * rstd;
    offset = fmaf(of_xhat, shift, layer ? -sums.y * per_column * rstd : -0.0f);
  }
  __device__ float operator()(float x, float g) const {
    return fmaf(x, slope, fmaf(g, rstd, offset));
  }
};

// By a CTA whose warps have rows of their own: their sums over rows, where the rings were.
template <class At, int kSlots>
__device__ inline void add_up_warps(const At& at, const float (&sums)[kSlots], char* shared,
                                    int warps, float* partials) {
  constexpr int kRowLanes = At::kStep;
  float* const slots = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  at.each([&](int i) { slots[(warp * kSlots + i) * 32 + lane] = sums[i]; });
  __syncthreads();
  for (int column = threadIdx.x; column < at.count; column += blockDim.x) {
    const int place = column / kRowLanes * 32 + column % kRowLanes;
    float sum = 0.0f;
    for (int w = 0; w < warps; ++w) {
#pragma unroll
      for (int r = 0; r < 32 / kRowLanes; ++r) {
        sum += slots[w * kSlots * 32 + place + r * kRowLanes];
      }
    }
    partials[column] = sum;
  }
}

}  // namespace ikbo::norm
