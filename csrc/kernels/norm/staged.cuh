// Rows on their way from global to shared memory, and sums of a row over its threads.
#pragma once

#include <cstdint>

#include "config/norm.h"
#include "hopper/bulk_copy.cuh"
#include "hopper/cluster.cuh"
#include "hopper/dependent_launch.cuh"
#include "hopper/l2_priority.cuh"
#include "hopper/mbarrier.cuh"
#include "hopper/memory_order.cuh"
#include "kernels/norm/row.cuh"

namespace ikbo::norm {

inline constexpr int kMaxWarps = 16;

// Which rows a CTA has a part in, and of them which columns. A team is a row's CTAs.
struct Place {
  int cluster, rank;
  int group;
  uint32_t team;  // of the group's
  int64_t first_column;

  template <bool kInWarp>
  __device__ static Place of_cta(const NormConfig& config) {
    Place at{kInWarp ? 1 : config.mapping.cluster, 0, 0, blockIdx.x, 0};
    if (at.cluster > 1) {
      at.rank = static_cast<int>(hopper::cluster_cta_rank());
      at.team = hopper::cluster_index();
      at.first_column = at.rank * config.mapping.cta_columns;
    }
    if (config.groups > 1) {
      at.group = static_cast<int>(at.team % config.groups);
      at.team /= config.groups;
    }
    return at;
  }
  // The same, of which the compiler knows nothing: as Columns::recomputed().
  __device__ Place recomputed(const NormConfig& config) const {
    Place copy = *this;
    asm volatile("" : "+r"(copy.group), "+r"(copy.rank));
    copy.first_column = copy.rank * config.mapping.cta_columns;
    return copy;
  }
};

// An operand of the ring: of the CTA's group, from its first column on. A row's span may begin and
// end anywhere: the aligned 16-byte pieces that cover it are copied, and its place in the stage
// keeps the address modulo 16. (What a piece holds beside the span is never used; it can't lie on
// another page than the span.) kFull: all spans begin and end at multiples of 16 bytes.
struct Staged {
  const char* data;  // of row 0
  int64_t row_stride;
  int row_bytes;  // of the span
  int step;       // from row to row in a stage
  int offset;     // in a stage

  // Returns what follows in the stage.
  __device__ int init(const NormMatrix& m, const Place& at, int columns, const NormConfig& config,
                      int pitch, int offset_, int size) {
    data = static_cast<const char*>(m.data) + at.group * m.group_bytes + at.first_column * size;
    row_stride = m.row_bytes;
    row_bytes = columns * size;
    step = config.rows_per_stage == 1 || row_stride == row_bytes ? row_bytes : pitch;
    offset = offset_;
    return offset + pitch * config.rows_per_stage;
  }
  // Whether a stage's rows lie one behind the other, there and in memory.
  __device__ static bool touches(const NormMatrix& m, int columns, const NormConfig& config) {
    return config.rows_per_stage == 1 || m.row_bytes == columns * size_of(m.type);
  }
  __device__ bool touches() const { return step == row_bytes; }
  __device__ const char* source(uint32_t row) const { return data + row * row_stride; }
  __device__ static int beyond_16(const char* address) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(address) & 15);
  }
  // Row first + i of the stage that begins with row `first`.
  template <bool kFull>
  __device__ const char* in_stage(const char* stage, uint32_t first, int i) const {
    const char* place = stage + offset + i * step;
    return kFull ? place : place + beyond_16(source(touches() ? first : first + i));
  }

  // A stage's rows one behind the other: by one thread. Returns the bytes.
  template <bool kFull>
  __device__ uint32_t load_at_once(char* stage, uint32_t first, int count,
                                   hopper::Barrier& barrier) const {
    return copy<kFull>(stage + offset, source(first), count * row_bytes, barrier);
  }
  // Every `threads`-th row from the begin-th on.
  template <bool kFull>
  __device__ uint32_t load_rows(char* stage, uint32_t first, int count, int begin, int threads,
                                hopper::Barrier& barrier) const {
    if (touches()) return begin == 0 ? load_at_once<kFull>(stage, first, count, barrier) : 0;
    uint32_t bytes = 0;
#pragma unroll 1
    for (int i = begin; i < count; i += threads) {
      bytes += copy<kFull>(stage + offset + i * step, source(first + i), row_bytes, barrier);
    }
    return bytes;
  }

 private:
  template <bool kFull>
  __device__ static uint32_t copy(char* to, const char* from, int bytes, hopper::Barrier& barrier) {
    if constexpr (!kFull) {
      const int before = beyond_16(from);
      from -= before;
      bytes = (before + bytes + 15) / 16 * 16;
    }
    hopper::bulk_load(to, from, bytes, barrier);
    return bytes;
  }
};

// A parameter or a result: of the CTA's group, from its first column on.
struct Target {
  char* data;  // of row 0
  int64_t row_bytes;

  __device__ Target(const NormMatrix& m, const Place& at, int size)
      : data(static_cast<char*>(m.data) + at.group * m.group_bytes + at.first_column * size),
        row_bytes(m.row_bytes) {}
  __device__ Target(const NormMatrix& m, const Place& at) : Target(m, at, size_of(m.type)) {}
  __device__ char* row(uint32_t row) const { return data + row * row_bytes; }
};

// The ring of stages of a warp that has rows of its own (kInWarp), or of the CTA. A block is a
// stage's rows. A ring's blocks are every owners-th; by ticket only its first ones are, then
// whichever is next.
//
// SMs are not equally fast, and a cluster's CTAs can't draw tickets without asking one another. So
// clusters are paced: one that is more than a row ahead of the average waits before it loads again,
// and leaves bandwidth to the others. Only so long: the others might not be running.
template <bool kInWarp, bool kFull>
struct Ring {
  const NormConfig& config;
  const uint32_t rows;
  const Staged* const operands;  // in shared memory
  const int operand_count;
  const bool touching;  // all operands' rows of a stage are
  char* const bytes;
  hopper::Barrier* const full;
  uint32_t* const counter;  // by ticket or paced, else null
  uint32_t* const drawn;    // by ticket: a stage's block

  // All readers.
  uint32_t block;
  int slot = 0;
  uint32_t phase = 0;

  // In the loading thread. By ticket: drawn one block ahead. Paced: blocks that all have done with.
  uint32_t count = 0;

  __device__ bool by_ticket() const { return !kInWarp && counter && config.by_ticket; }
  __device__ bool paced() const { return !kInWarp && counter && config.paced; }

  // By the loader, which is the warp, or a thread of the CTA (by ticket, always the same): the
  // first loads of all stages; a later load into a stage that all readers have done with, when they
  // go on from block `done`.
  __device__ void load_first() {
#pragma unroll 1
    for (int s = 0; s < config.stages; ++s) load(s, block + s * config.owners);
    if (by_ticket()) count = draw();
  }
  __device__ void load_again(int stage, uint32_t done) {
    const uint32_t next = config.stages * config.owners + (by_ticket() ? count : done);
    if (paced()) keep_pace(done / config.owners, next);
    load(stage, next);
    if (by_ticket()) count = draw();
  }

  // Whether there is a block at hand; waits for it.
  __device__ bool wait() {
    if (!by_ticket() && block >= config.blocks) return false;
    hopper::wait(full[slot], phase);
    if (by_ticket()) block = drawn[slot];
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
  __device__ uint32_t draw() const {
    return hopper::count_relaxed_gpu(counter, config.blocks | 1u << 31);
  }

  // After `before` blocks and another, before `next`.
  __device__ void keep_pace(uint32_t before, uint32_t next) {
    constexpr int kTries = 16;  // a trip to L2 each
    hopper::add_relaxed_gpu(counter, 1);
    const uint32_t enough = next < config.blocks ? before * config.owners : 0;
    for (int i = 0; count < enough && i < kTries; ++i) count = hopper::load_relaxed_gpu(counter);
    count = hopper::load_relaxed_gpu(counter);
  }

  __device__ void load(int stage, uint32_t next) {
    if (by_ticket()) drawn[stage] = next;
    if (next < config.blocks) {
      load_block(stage, next);
    } else if (by_ticket()) {
      hopper::arrive(full[stage]);
    }
  }

  __device__ void load_block(int stage, uint32_t next) {
    const int lane = kInWarp ? threadIdx.x % 32 : 0;
    const uint32_t first = next * config.rows_per_stage;
    const int count = rows_from(first);
    char* const to = bytes + stage * config.stage_bytes;
    uint32_t expected = 0;
    if (kInWarp && kFull && touching) {
      // A lane for each operand: one after the other each would wait for what it reads of it.
      if (lane < operand_count) {
        operands[lane].template load_at_once<kFull>(to, first, count, full[stage]);
      }
      if (lane > 0) return;
      for (int i = 0; i < operand_count; ++i) expected += count * operands[i].row_bytes;
    } else if (touching) {
      if (lane > 0) return;
#pragma unroll 1
      for (int i = 0; i < operand_count; ++i) {
        expected += operands[i].template load_at_once<kFull>(to, first, count, full[stage]);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < operand_count; ++i) {
        expected += operands[i].template load_rows<kFull>(to, first, count, lane, kInWarp ? 32 : 1,
                                                          full[stage]);
      }
      if constexpr (kInWarp) {
        if (lane > 0 && expected > 0) hopper::expect_bytes(full[stage], expected);
        __syncwarp();  // all bytes are expected
        if (lane > 0) return;
      }
    }
    hopper::arrive_expect_bytes(full[stage], expected);
  }
};

// One thread: the operands of a ring, one behind the other in a stage.
template <class... Matrices>
__device__ inline void lay_out(Staged* staged, const Place& place, int columns,
                               const NormConfig& config, const Matrices&... operands) {
  int end = 0, i = 0;
  ((end = staged[i].init(operands, place, columns, config, config.pitches[i], end,
                         size_of(operands.type)),
    ++i),
   ...);
}

// Before a kernel reads what the one ahead may write. Parameters and config are asked for first.
template <class Params>
__device__ inline void begin(const Params& p, const NormConfig& config) {
  hopper::touch(p);
  hopper::touch(config);
  hopper::wait_for_previous_kernel();
}

// A team's rows, every step-th, from its last one back to `first`. `end` is the one behind its
// last. (Differences wrap around where it has no row.)
template <class Body>
__device__ inline void each_row_back(uint32_t end, uint32_t step, uint32_t rows, uint32_t first,
                                     const Body& body) {
  for (uint32_t row = end - step; row < rows && row >= first; row -= step) body(row);
}

// All threads that share rows: a cluster's, or a CTA's; warps with rows of their own share none.
template <bool kInWarp>
__device__ inline void meet(const Place& place) {
  if (place.cluster > 1) {
    hopper::cluster_sync();
  } else if (!kInWarp) {
    __syncthreads();
  }
}

// Over the lanes of a row, for all of them: `lanes` is a power of two, up to kMost, the same for
// all threads. Offsets up to 8 lanes' are all shuffled, which costs less than a branch at each;
// where kMost is `lanes`, no others.
template <int kMost, class Step>
__device__ inline void each_offset(int lanes, const Step& step) {
  if (lanes > 8) {
#pragma unroll
    for (int offset = kMost / 2; offset >= 8; offset /= 2) step(offset);
  }
#pragma unroll
  for (int offset = kMost < 8 ? kMost / 2 : 4; offset >= 1; offset /= 2) step(offset);
}
template <int kMost = 32, class Merge>
__device__ inline float merge_lanes(float value, int lanes, const Merge& merge) {
  each_offset<kMost>(lanes, [&](int offset) {
    const float other = __shfl_xor_sync(0xffffffffu, value, offset);
    if (offset < lanes) value = merge(value, other);
  });
  return value;
}
// Two values side by side: one after the other they would take as many waits.
template <int kMost = 32>
__device__ inline float2 sum_lanes(float2 values, int lanes) {
  each_offset<kMost>(lanes, [&](int offset) {
    const float x = __shfl_xor_sync(0xffffffffu, values.x, offset);
    const float y = __shfl_xor_sync(0xffffffffu, values.y, offset);
    if (offset < lanes) values.x += x, values.y += y;
  });
  return values;
}
template <int kMost = 32>
__device__ inline float sum_lanes(float value, int lanes) {
  return merge_lanes<kMost>(value, lanes, [](float a, float b) { return a + b; });
}
// NaN where there is one.
__device__ inline float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
template <int kMost = 32>
__device__ inline float max_lanes(float value, int lanes) {
  return merge_lanes<kMost>(value, lanes, max_or_nan);
}

// The scale of a row whose largest value is `largest`, which then becomes e4m3's largest. At least
// the smallest normal number: a row of zeros then divides into zeros.
__device__ inline float scale_of_row(float largest) {
  return max_or_nan(largest / 448.0f, 1.17549435e-38f);
}

// What rows are multiplied by to be normalised and, by 1 / scale, scaled at once. Finite, or else
// NaN: a row of zeros stays one.
__device__ inline float scaled_root(float rstd, float per_scale) {
  float factor;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(factor) : "f"(__fmul_rn(rstd, per_scale)), "f"(3.4e38f));
  return factor;
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

// The second half of exchange().
template <class Merge>
__device__ inline float4 exchange_ctas(Exchange& shared, uint32_t buffer, uint32_t phase,
                                       int cluster, const float4& value, const Merge& merge) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    if (lane == 0) hopper::arrive_expect_bytes(shared.ready[buffer], sizeof(float4) * cluster);
    if (lane < cluster) {
      hopper::store_async_in_cluster(&shared.of_cta[buffer][hopper::cluster_cta_rank()],
                                     shared.ready[buffer], lane, value);
    }
    __syncwarp();
  }
  hopper::wait(shared.ready[buffer], phase);
  return merge(shared.of_cta[buffer][lane & (cluster - 1)], cluster, true);
}

// Merges the values of all warps of a row, for all threads, in the same order each time. All
// threads of the CTA (and of its cluster) call it; `turn` counts the calls. merge(value, width,
// all) reduces the values of `width` lanes, which repeat themselves over the warp, to one for all
// lanes: of the CTA's warps, then, if `all`, of the cluster's CTAs. between() runs after a barrier
// of the CTA.
template <class Merge, class Between>
__device__ inline float4 exchange(Exchange& shared, uint32_t& turn, int cluster, float4 value,
                                  const Merge& merge, const Between& between) {
  const uint32_t buffer = turn & 1, phase = turn >> 1 & 1;
  ++turn;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  const int width = warps <= 1 ? 1 : 1 << (32 - __clz(warps - 1));
  const float4 nothing{0.0f, 0.0f, 0.0f, 0.0f};
  if (lane == 0) shared.of_warp[buffer][warp] = value;
  __syncthreads();
  between();
  const int peer = lane & (width - 1);
  value = merge(peer < warps ? shared.of_warp[buffer][peer] : nothing, width, false);
  return cluster == 1 ? value : exchange_ctas(shared, buffer, phase, cluster, value, merge);
}

}  // namespace ikbo::norm
