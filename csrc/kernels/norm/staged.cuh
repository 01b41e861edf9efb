// Rows on their way from global to shared memory, and sums of a row over its threads.
#pragma once

#include <cstdint>

#include "config/norm.h"
#include "hopper/bulk_copy.cuh"
#include "hopper/cluster.cuh"
#include "hopper/mbarrier.cuh"
#include "kernels/norm/row.cuh"

namespace ikbo::norm {

inline constexpr int kMaxWarps = 16;

// An operand of the ring. A row's span may begin and end anywhere: the aligned 16-byte pieces that
// cover it are copied, and its place in the stage keeps the address modulo 16. (What a piece holds
// beside the span is never used; it can't lie on another page than the span.)
struct Staged {
  const char* data;  // of row 0, from the CTA's first column on
  int64_t row_stride;
  int row_bytes;  // of the span
  int step;       // from row to row in a stage
  int offset;     // in a stage
  bool together;  // a stage's rows lie one behind the other

  // Returns what follows in the stage.
  __device__ int init(const NormMatrix& m, int group, int64_t first_column, int columns,
                      int offset_, int rows_per_stage) {
    const int size = size_of(m.type);
    data = static_cast<const char*>(m.data) + group * m.group_bytes + first_column * size;
    row_stride = m.row_bytes;
    row_bytes = columns * size;
    const int pitch = (row_bytes + 15) / 16 * 16 + 16;
    offset = offset_;
    together = row_stride == row_bytes || rows_per_stage == 1;
    step = together ? row_bytes : pitch;
    return offset + rows_per_stage * pitch;
  }
  __device__ const char* source(int64_t row) const { return data + row * row_stride; }
  __device__ static int beyond_16(const char* address) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(address) & 15);
  }
  // Row first + i of the stage that begins with row `first`. Aligned: all rows begin at multiples
  // of 16 bytes.
  template <bool kAligned>
  __device__ const char* in_stage(const char* stage, int64_t first, int i) const {
    const char* place = stage + offset + i * step;
    return kAligned ? place : place + beyond_16(source(together ? first : first + i));
  }
  __device__ void copy(char* to, const char* from, int bytes, hopper::Barrier& barrier) const {
    const int before = beyond_16(from);
    const uint32_t pieces = (before + bytes + 15) / 16 * 16;
    hopper::expect_bytes(barrier, pieces);
    hopper::bulk_load(to, from - before, pieces, barrier);
  }
  // By one warp.
  __device__ void load(char* stage, int64_t first, int count, hopper::Barrier& barrier) const {
    const int lane = threadIdx.x % 32;
    if (together) {
      if (lane == 0) copy(stage + offset, source(first), count * row_bytes, barrier);
    } else {
#pragma unroll 1
      for (int i = lane; i < count; i += 32) {
        copy(stage + offset + i * step, source(first + i), row_bytes, barrier);
      }
    }
  }
};

// A parameter or a result: of the CTA's group, from its first column on.
struct Target {
  char* data;  // of row 0
  int64_t row_bytes;

  __device__ void init(const NormMatrix& m, int group, int64_t first_column, int size) {
    data = static_cast<char*>(m.data) + group * m.group_bytes + first_column * size;
    row_bytes = m.row_bytes;
  }
  __device__ void init(const NormMatrix& m, int group, int64_t first_column) {
    init(m, group, first_column, size_of(m.type));
  }
  __device__ char* row(uint32_t row) const { return data + row * row_bytes; }
};

// The ring of stages of a warp that has rows of its own, or of the CTA. A block is a stage's rows.
// A ring's blocks are every owners-th; by ticket only its first ones are, then whichever is next.
struct Ring {
  const NormConfig& config;
  const uint32_t rows;
  const Staged* operands;  // in shared memory
  const int operand_count;
  char* const bytes;
  hopper::Barrier* const full;
  uint32_t* const ticket;  // null where blocks are strided
  uint32_t* const drawn;   // by ticket: a stage's block

  // All readers.
  uint32_t block;
  int slot = 0;
  uint32_t phase = 0;

  // By ticket, in the loading warp, which is the same all the time.
  int loaded = 0;       // up to `stages`
  uint32_t number = 0;  // drawn one block ahead, lane 0's

  // Both by one warp: the first loads of all stages; a later load into a stage that all readers
  // have done with, when they go on from block `done`.
  __device__ void load_first() {
#pragma unroll 1
    for (int s = 0; s < config.stages; ++s) load(s, block + s * config.owners);
  }
  __device__ void load_again(int stage, uint32_t done) {
    load(stage, done + config.stages * config.owners);
  }

  // Whether there is a block at hand; waits for it.
  __device__ bool wait() {
    if (!ticket) {
      if (block >= config.blocks) return false;
      hopper::wait(full[slot], phase);
      return true;
    }
    hopper::wait(full[slot], phase);
    block = drawn[slot];
    return block < config.blocks;
  }
  __device__ void advance() {
    block += config.owners;
    if (++slot == config.stages) slot = 0, phase ^= 1;
  }
  __device__ const char* stage() const { return bytes + slot * config.stage_bytes; }
  __device__ uint32_t first_row() const { return block * config.rows_per_stage; }
  __device__ int rows_from(uint32_t first) const {
    return static_cast<int>(min(static_cast<uint32_t>(config.rows_per_stage), rows - first));
  }

 private:
  __device__ void load(int stage, uint32_t next) {
    const bool leader = threadIdx.x % 32 == 0;
    if (ticket && loaded == config.stages) {
      next = config.stages * config.owners + __shfl_sync(0xffffffffu, number, 0);
    }
    const bool has_next = next < config.blocks;
    if (has_next) {
      const uint32_t first = next * config.rows_per_stage;
      const int count = rows_from(first);
#pragma unroll 1
      for (int i = 0; i < operand_count; ++i) {
        operands[i].load(bytes + stage * config.stage_bytes, first, count, full[stage]);
      }
    }
    __syncwarp();  // all bytes are expected
    if (leader && ticket) drawn[stage] = next;
    if (leader && (ticket || has_next)) hopper::arrive(full[stage]);
    if (!ticket) return;
    if (loaded < config.stages) ++loaded;
    if (leader && loaded == config.stages) number = atomicAdd(ticket, 1u);
  }
};

// Over the lanes of a row, for all of them: `lanes` is a power of two, or at least a whole warp's.
template <class Merge>
__device__ inline float merge_lanes(float value, int lanes, const Merge& merge) {
#pragma unroll
  for (int offset = 16; offset >= 1; offset /= 2) {
    if (offset < lanes) value = merge(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}
__device__ inline float sum_lanes(float value, int lanes) {
  return merge_lanes(value, lanes, [](float a, float b) { return a + b; });
}
// NaN where there is one.
__device__ inline float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
__device__ inline float max_lanes(float value, int lanes) {
  return merge_lanes(value, lanes, max_or_nan);
}

// The scale of a row whose largest value is `largest`, which then becomes e4m3's largest. At least
// the smallest normal number: a row of zeros then divides into zeros.
__device__ inline float scale_of_row(float largest) {
  return max_or_nan(largest / 448.0f, 1.17549435e-38f);
}

// Sums of a CTA's warps and of a cluster's CTAs on their way to all of them. Two of each: a value
// is written again only after a barrier that its readers have passed.
struct Exchange {
  float4 of_warp[2][kMaxWarps];
  float4 of_cta[2][kMaxWarps];
  hopper::Barrier ready[2];

  __device__ void init() {
    hopper::init(ready[0], 1);
    hopper::init(ready[1], 1);
  }
};

// Merges the values of all warps of a row, for all threads, in the same order each time. All
// threads of the CTA (and of its cluster) call it; `turn` counts the calls. merge() reduces the
// values of lanes 0 ... 15, and those of 16 ... 31, which are the same, to one for all lanes.
// between() runs after a barrier of the CTA.
template <class Merge, class Between>
__device__ inline float4 exchange(Exchange& shared, uint32_t& turn, int cluster, float4 value,
                                  const Merge& merge, const Between& between) {
  const uint32_t buffer = turn & 1, phase = turn >> 1 & 1;
  ++turn;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float4 nothing{0.0f, 0.0f, 0.0f, 0.0f};
  if (lane == 0) shared.of_warp[buffer][warp] = value;
  __syncthreads();
  between();
  const bool has_warp = lane % kMaxWarps < blockDim.x / 32;
  value = merge(has_warp ? shared.of_warp[buffer][lane % kMaxWarps] : nothing);
  if (cluster == 1) return value;
  if (warp == 0) {
    if (lane == 0) hopper::arrive_expect_bytes(shared.ready[buffer], sizeof(float4) * cluster);
    if (lane < cluster) {
      hopper::store_async_in_cluster(&shared.of_cta[buffer][hopper::cluster_cta_rank()],
                                     shared.ready[buffer], lane, value);
    }
    __syncwarp();
  }
  hopper::wait(shared.ready[buffer], phase);
  const bool has_cta = lane % kMaxWarps < cluster;
  return merge(has_cta ? shared.of_cta[buffer][lane % kMaxWarps] : nothing);
}

}  // namespace ikbo::norm
