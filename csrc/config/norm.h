// How the norm kernels lay a row over threads: a pure function of the row's length, tested on the
// CPU. The order of a row's sums follows from it, so a row's bits don't depend on the row count.
//
// A row is cut into vectors of 16 bytes of x. Short rows take a warp or a part of one; longer ones
// a CTA, and longer ones yet a cluster of CTAs that each hold a span of columns. Rows beyond the
// largest cluster are read several times (`looped`). Rows whose vectors would leave slots without a
// column are dealt out by elements (`interleaved`).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "config/device_limits.h"

namespace ikbo {

enum class NormPass { kForward, kBackward };

struct NormMapping {
  static constexpr int kMaxCluster = 16;
  // Vectors a thread has of a row. Of a row over several warps, up to 4.
  static constexpr std::array<int, 6> kThreadVectors = {1, 2, 3, 4, 5, 9};
  static constexpr int kCtaThreadVectors = 4;

  bool looped;
  bool interleaved;  // neighbouring threads have neighbouring columns, not neighbouring vectors
  int64_t columns;
  int vector;           // elements of a vector
  int cluster;          // CTAs a row
  int warps;            // of a CTA
  int lanes;            // threads a row has in a CTA: up to 32 of a warp, or all
  int thread_vectors;   // vectors a thread has of a row
  int64_t cta_columns;  // columns a CTA has of a row; the last of a cluster may have fewer

  constexpr bool in_warp() const { return !looped && lanes <= 32; }
  int rows_per_warp() const { return lanes < 32 ? 32 / lanes : 1; }

  // Threads' slots that hold no column, of all CTAs of a row.
  int64_t idle_slots() const {
    return looped ? 0 : int64_t{cluster} * lanes * thread_vectors * vector - columns;
  }

  // The column of element e of vector v of a row's thread; -1 where there is none. Interleaved, the
  // warps of a CTA share its columns evenly.
  int64_t column(int cta, int thread, int v, int e) const {
    if (interleaved) {
      const int64_t count = std::min(cta_columns, columns - cta * cta_columns);
      const int warp = in_warp() ? 0 : thread / 32, parts = in_warp() ? 1 : warps;
      const int step = std::min(lanes, 32), slot = v * vector + e;
      const int64_t inside = count * warp / parts + slot * step + thread % step;
      return inside < count * (warp + 1) / parts ? cta * cta_columns + inside : -1;
    }
    const int64_t inside = (int64_t{v} * lanes + thread) * vector + e;
    const int64_t column = cta * cta_columns + inside;
    return inside < cta_columns && column < columns ? column : -1;
  }
};

namespace norm_detail {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Lanes (a power of two) and vectors a lane for a row within a warp: fewest idle. Of those the
// backward, which keeps sums a column, takes the most lanes; the forward takes up to 4 vectors a
// lane, so that a row's sums cost less beside its elements. Eight lanes at least, for a bank each
// when rows lie next to one another in shared memory. Returns the idle vectors.
inline int64_t fit_in_warp(NormPass pass, int64_t vectors, NormMapping& m) {
  int64_t fewest = INT64_MAX;
  for (int lanes = 32; lanes >= 1; lanes /= 2) {
    for (const int each : NormMapping::kThreadVectors) {
      const int64_t idle = int64_t{lanes} * each - vectors;
      if (idle < 0 || (lanes < 8 && each > 1)) continue;
      // Else a row would take the kernel for 9, with half as many warps an SM.
      if (each > 4 && idle > 0 && vectors <= 128) continue;
      const bool fewer_lanes =
          pass == NormPass::kForward && idle == fewest && each <= NormMapping::kCtaThreadVectors;
      if (idle >= fewest && !fewer_lanes) continue;
      fewest = idle;
      m.lanes = lanes;
      m.thread_vectors = each;
    }
  }
  return fewest;
}

// Warps and vectors a thread for a row's span of `packets`, 32 vectors each: fewest idle. Of those
// the forward takes the most vectors, so that an SM works on more rows; the backward, which leaves
// a partial sum a CTA, the fewest. Returns the idle packets.
inline int64_t fit_in_cta(NormPass pass, int64_t packets, NormMapping& m) {
  // The backward of 16 packets takes 16 warps: with two vectors a thread a row wouldn't fit its
  // registers, and would be read twice.
  const bool one_each = pass == NormPass::kBackward && packets == 16;
  const int most = packets <= 8 * NormMapping::kCtaThreadVectors && !one_each ? 8 : 16;
  int64_t fewest = INT64_MAX;
  for (int each = 1; each <= NormMapping::kCtaThreadVectors; ++each) {
    const int64_t warps = ceil_div(packets, each), idle = warps * each - packets;
    const bool more_vectors = pass == NormPass::kForward && idle == fewest;
    if (warps > most || (idle >= fewest && !more_vectors)) continue;
    fewest = idle;
    m.warps = static_cast<int>(warps);
    m.lanes = 32 * m.warps;
    m.thread_vectors = each;
  }
  return fewest;
}

// Deals out columns by elements, over the same CTAs. The fewer lanes a row has the less its sums
// and addresses cost beside its elements.
inline void interleave(NormPass pass, NormMapping& m) {
  m.interleaved = true;
  m.cta_columns = m.columns;
  for (int turn = 0; turn < 3; ++turn) {
    m.lanes = 8 << turn;
    m.thread_vectors = static_cast<int>(ceil_div(ceil_div(m.columns, m.lanes), m.vector));
    if (m.thread_vectors <= 2 + turn) return;
  }
  // Two vectors a thread of up to 16 warps, of which registers hold weight and bias as well.
  const auto packets = [&] {
    m.cta_columns = ceil_div(m.columns, m.cluster);
    return ceil_div(ceil_div(m.cta_columns, m.vector), 32);
  };
  m.thread_vectors = pass == NormPass::kForward ? 4 : 2;
  while (packets() > 32) m.cluster *= 2;
  m.looped = m.cluster > NormMapping::kMaxCluster;
  m.warps = static_cast<int>(ceil_div(packets(), m.thread_vectors));
  m.lanes = 32 * m.warps;
}

}  // namespace norm_detail

// The vectors a thread that the kernel for a mapping is compiled for. `full`: every thread has so
// many, whole and aligned, and the kernel is compiled for the very number, as are those for
// interleaved columns.
constexpr int norm_compiled_vectors(int vectors, bool in_warp, bool full) {
  if (full) return vectors;
  if (vectors <= 2) return 2;
  return vectors <= 4 || !in_warp ? 4 : 9;
}

// The most threads of a CTA of the kernel compiled for so many vectors. (Whether a row is full
// depends on addresses too. So 5 vectors, which others than full rows have as 9, count as 9.)
constexpr int norm_max_threads(NormPass pass, int compiled_vectors, bool in_warp) {
  if (!in_warp) return 512;
  return pass == NormPass::kForward || compiled_vectors > 4 ? 256 : 384;
}

// Of a CTA of the forward of interleaved rows, each with rows of its own.
inline constexpr int kNormUnitWarps = 4;

namespace norm_detail {

inline NormMapping looped(NormMapping m) {
  m.interleaved = false;
  m.cluster = 1;
  m.cta_columns = m.columns;
  m.warps = 16;
  m.lanes = 32 * m.warps;
  return m;
}

inline NormMapping by_vectors(NormPass pass, int64_t columns, int element_bytes) {
  const bool forward = pass == NormPass::kForward;
  NormMapping m{};
  m.columns = columns;
  m.vector = 16 / element_bytes;
  m.cluster = 1;
  m.cta_columns = columns;
  const int64_t vectors = ceil_div(columns, m.vector), packets = ceil_div(vectors, 32);

  // In a warp up to 4 vectors a lane, and more where that fits the row better than a CTA does. The
  // backward of 32 lanes with 4 has too few warps: it takes a CTA of a vector a thread.
  const bool spreads = !forward && vectors == 4 * 32;
  if (!spreads && vectors <= 32 * NormMapping::kThreadVectors.back()) {
    NormMapping cta = m;
    const int64_t idle = fit_in_warp(pass, vectors, m);
    const int64_t cta_idle = fit_in_cta(pass, packets, cta) * 32 + packets * 32 - vectors;
    if (vectors <= 32 * NormMapping::kCtaThreadVectors || idle < cta_idle) return m;
  }
  // The backward keeps sums a column in registers, so a CTA takes half as much.
  const int64_t half = 8 * NormMapping::kCtaThreadVectors, most = 2 * half;
  // Up to half of that again still fills an SM alone.
  constexpr int64_t kAlone = 48;
  int64_t a_cta = forward || (packets > half && packets <= kAlone) ? most : half;
  if (packets > a_cta * NormMapping::kMaxCluster) a_cta = most;
  while (a_cta * m.cluster < packets) m.cluster *= 2;
  if (m.cluster > NormMapping::kMaxCluster) {
    m.looped = true;
    return m;
  }
  const int64_t span = ceil_div(packets, m.cluster);
  fit_in_cta(pass, span, m);
  if (m.cluster > 1) m.cta_columns = span * 32 * m.vector;
  return m;
}

}  // namespace norm_detail

// `element_bytes` of x; columns >= 1.
inline NormMapping norm_mapping(NormPass pass, int64_t columns, int element_bytes) {
  NormMapping m = norm_detail::by_vectors(pass, columns, element_bytes);
  if (m.idle_slots() > 0) norm_detail::interleave(pass, m);
  if (m.looped) return norm_detail::looped(m);
  if (m.in_warp()) {
    const bool units = pass == NormPass::kForward && m.interleaved;
    m.warps = units ? kNormUnitWarps : norm_max_threads(pass, m.thread_vectors, true) / 32;
  }
  return m;
}

// A mapping, and what depends on the rest of the problem: never the order of a row's sums.
struct NormConfig {
  static constexpr int kMaxStages = 6;
  static constexpr int kMaxStaged = 3;
  static constexpr int kWideTeams = 2, kWideStages = 3;
  static constexpr int kPairVectors = 2;  // up to which the backward's CTA takes two rows at once

  NormPass pass;
  NormMapping mapping;
  int groups;   // rows of each have weights of their own; a CTA has rows of one
  bool whole;   // forward, of whole aligned vectors: threads for every row, without a ring
  bool wide;    // forward, of clusters: norm_forward_wide_sm90, whose rings are its teams'
  bool direct;  // forward, others: a CTA for each few rows, without a ring
  float per_column, per_cta_column;  // 1 over a row's columns, over a CTA's part of them
  int at_once;                       // rows that a warp, or the CTA, works on side by side
  int rows_per_stage;                // of a warp, or of the CTA
  uint32_t blocks;                   // of a stage's rows, in a group
  uint32_t owners;                   // rings that have a group's blocks
  int stages;
  int stage_bytes;                      // of a ring; a warp has its own, or the CTA
  std::array<int, kMaxStaged> pitches;  // of an operand's rows in a stage, unless they touch
  int rings;                            // a CTA
  int grid;                             // CTAs
  int partials;    // of each group: the backward's sums over rows, one a CTA or cluster
  bool bias_sums;  // whether sums of grad_bias are kept, in shared memory
  bool by_ticket;  // blocks from a counter: whichever CTA is free
  bool paced;      // forward, clusters: who is ahead of the others waits
  int lead;        // backward: turns that a CTA may be ahead of the average; 0: any
  // Forward: every thread keeps its vectors of weight and bias, in x's type, in shared memory.
  // Whole rows: where they are few, for their loads then don't wait for the row.
  bool keeps_parameters;
  // Forward: x is much larger than the L2 cache, and its lines there go after others'. Wide rows
  // gain 3 to 5 % by it, as if the results' lines else stayed too long. From a row on they are made
  // ordinary ones again, half the cache full: else what comes next would pay, up to 7 us
  // (docs/norms.md).
  bool evict_last;
  uint32_t ordinary_from;

  constexpr bool has_counter() const { return by_ticket || paced; }
  // A float for every column slot of every thread.
  constexpr int sum_bytes() const {
    return mapping.warps * 32 * mapping.thread_vectors * mapping.vector * 4;
  }
  // Registers hold those of a CTA's short rows, and of interleaved ones within a warp.
  constexpr int bias_sum_bytes() const {
    const bool held =
        mapping.in_warp() ? mapping.interleaved : mapping.thread_vectors <= kPairVectors;
    return bias_sums && !held ? sum_bytes() : 0;
  }
  constexpr int parameter_bytes() const {
    return keeps_parameters ? 2 * 16 * mapping.warps * 32 * mapping.thread_vectors : 0;
  }
  // In the end the rings serve to add up the sums of warps.
  constexpr int ring_bytes() const {
    const int bytes = stage_bytes * stages * rings;
    return pass == NormPass::kBackward && rings > 1 ? std::max(bytes, sum_bytes()) : bytes;
  }
  constexpr int shared_bytes() const { return ring_bytes() + kept_bytes(); }
  constexpr int kept_bytes() const { return bias_sum_bytes() + parameter_bytes(); }
};

struct NormProblemSize {
  int64_t rows, columns;  // rows of a group
  int groups;
  // Bytes of an element of what goes through the ring, x first, 0 for what isn't there. Forward: x
  // and residual; backward: x, grad_y, grad_residual_out.
  std::array<int, NormConfig::kMaxStaged> staged;
  bool bias_sums;  // backward: whether grad_bias is wanted
  // Forward: whether all rows of x, the residual and the results begin at multiples of 16 bytes;
  // whether all is of x's type, with a weight and, beside means and only there, a bias, and nothing
  // else; and, in the backward too, whether there are means.
  bool aligned, usual, layer;
};

namespace norm_detail {

// A staged span begins and ends at multiples of 16 bytes, wherever the row lies.
inline int pitch(const NormMapping& m, int element_bytes) {
  if (element_bytes == 0) return 0;
  return static_cast<int>(ceil_div(m.cta_columns * element_bytes, 16) * 16 + 16);
}

inline int64_t staged_row_bytes(const NormConfig& c) {
  return int64_t{c.pitches[0]} + c.pitches[1] + c.pitches[2];
}

inline int stage_bytes(const NormConfig& c, int slack = 0) {
  return static_cast<int>(ceil_div(staged_row_bytes(c) * c.rows_per_stage + slack, 128) * 128);
}

// The forward of interleaved rows has no ring: a warp, or a CTA, has a few rows, which come at
// once, and then ends.
inline void units(NormConfig& c, const NormProblemSize& p, const DeviceLimits& device) {
  NormMapping& m = c.mapping;
  // Results begin up to 16 bytes before what they replace. Behind the last row lanes read on, in up
  // to 8 slots, or 4 of a row within a warp (LooseColumns::each in norm/loose.cuh).
  const int slack = 2 * 16 + (m.in_warp() ? 4 * m.lanes : 8 * 32) * 4;
  // A warp takes its rows in four turns, and a CTA two, or more of short ones: what each does once,
  // weights among it, costs as much as half a turn. More cost occupancy (docs/norms.md).
  const int fewest = m.in_warp() ? 4 : 2;
  const int64_t enough_bytes = m.in_warp() ? 4096 : 20480;  // of x
  // Unless CTAs are so few that they run at once.
  const int64_t enough_ctas = 16 * int64_t{device.sm_count};
  const int64_t turn_bytes = m.cta_columns * p.staged[0] * c.at_once;
  c.rings = m.in_warp() ? m.warps : 1;
  int turns = 1;
  const auto teams = [&] { return ceil_div(p.rows, int64_t{turns} * c.at_once * c.rings); };
  while (turns < 16 && (turns < fewest || 2 * turns * turn_bytes <= enough_bytes) &&
         teams() * p.groups > enough_ctas) {
    turns *= 2;
  }
  c.rows_per_stage = turns * c.at_once;
  c.stages = 1;
  c.stage_bytes = stage_bytes(c, slack);
  c.blocks = static_cast<uint32_t>(ceil_div(p.rows, c.rows_per_stage));
  c.owners = static_cast<uint32_t>(teams() * c.rings);
  c.partials = static_cast<int>(teams());
  c.grid = static_cast<int>(teams()) * m.cluster * p.groups;
}

}  // namespace norm_detail

inline NormConfig norm_config(NormPass pass, const NormProblemSize& p, const DeviceLimits& device) {
  using norm_detail::ceil_div;
  constexpr int64_t kStageBytes = 2048;   // of x, at least, where rows are short
  constexpr int64_t kTicketStage = 8192;  // of x: a counter takes about 400 draws a microsecond
  constexpr int64_t kStaticBytes = 4096;  // more than the kernels' barriers and sums take
  const bool forward = pass == NormPass::kForward;
  // From here on that SMs are not equally fast is worth a counter, which costs its clearing.
  constexpr int64_t kTicketBytes = int64_t{32} << 20;
  constexpr int64_t kPacedBytes = int64_t{256} << 20;
  // Up to here starting CTAs is quicker than setting up rings.
  constexpr int64_t kDirectBytes = int64_t{4} << 20;
  NormConfig c{};
  c.pass = pass;
  c.groups = p.groups;
  c.mapping = norm_mapping(pass, p.columns, p.staged[0]);
  NormMapping& m = c.mapping;
  c.per_column = 1.0f / static_cast<float>(m.columns);
  c.per_cta_column = 1.0f / static_cast<float>(m.cta_columns);
  for (int i = 0; i < NormConfig::kMaxStaged; ++i) {
    c.pitches[i] = m.looped ? 0 : norm_detail::pitch(m, p.staged[i]);
  }
  c.at_once = m.in_warp() ? m.rows_per_warp() : 1;
  c.rows_per_stage = 1;
  c.rings = 1;
  c.bias_sums = !forward && p.bias_sums && !m.looped;
  // Both parts of a row for a cluster of two, of 4 vectors a thread, suit one CTA of 1024 threads.
  const bool halves = p.usual && !p.layer && m.cluster == 2 && m.thread_vectors == 4;
  const int64_t l2_rows = device.l2_bytes / (p.columns * p.staged[0] * p.groups);
  c.evict_last = forward && !m.in_warp() && p.rows > 2 * l2_rows;
  c.ordinary_from = static_cast<uint32_t>(p.rows - (c.evict_last ? l2_rows / 2 : 0));
  const bool aligned = forward && p.aligned && !m.looped && m.idle_slots() == 0;
  if (aligned && (m.cluster == 1 || halves)) {
    // With weights on their way at once few rows are done in 0.55 to 0.75 of the time. With more
    // rows than run at a time, 32 warps an SM, others cover the wait and registers would be missed.
    constexpr int kWarpsAtOnce = 32;
    // Two warps a CTA are 1 to 3 % quicker than four, where CTAs don't end faster than an SM starts
    // others: of 2 vectors that costs a fifth.
    if (m.in_warp()) m.warps = m.thread_vectors > 2 ? 2 : 4;
    const int64_t rows_per_cta = m.in_warp() ? m.warps * c.at_once : 1;
    c.whole = true;
    c.grid = static_cast<int>(ceil_div(p.rows, rows_per_cta)) * p.groups;
    c.keeps_parameters = int64_t{c.grid} * m.warps <= int64_t{kWarpsAtOnce} * device.sm_count;
    return c;
  }
  // Clusters of 4 and more leave SMs over: 30 of 4, 15 of 8, 7 of 16 fit on 132 SMs.
  const auto clusters_at_once = [&](int per_sm) -> int64_t {
    const int64_t clusters = per_sm * device.sm_count / m.cluster;
    return m.cluster >= 4 ? clusters * 10 / 11 : clusters;
  };
  if (aligned && p.usual) {
    c.wide = true;
    c.rings = NormConfig::kWideTeams;
    c.stages = NormConfig::kWideStages;
    c.stage_bytes = 16 * m.thread_vectors * m.lanes;
    c.owners = static_cast<uint32_t>(std::clamp<int64_t>(
        ceil_div(p.rows, c.rings), 1, std::max<int64_t>(clusters_at_once(1), 1)));
    c.grid = static_cast<int>(c.owners) * m.cluster;
    c.paced = p.rows * p.columns * p.staged[0] >= kTicketBytes;
    return c;
  }
  // A CTA without a second stage would wait for each row.
  const auto fits = [&] {
    return m.in_warp() || 2 * norm_detail::staged_row_bytes(c) + c.kept_bytes() + kStaticBytes <=
                              device.max_shared_bytes_per_cta;
  };
  c.keeps_parameters = forward && !m.looped && !m.interleaved;
  if (!fits()) c.keeps_parameters = false;
  if (!fits()) m.looped = true;
  if (m.looped) {
    constexpr int kLoopedPartials = 128;
    c.bias_sums = c.keeps_parameters = false;
    m.warps = 16;
    c.grid = static_cast<int>(std::min<int64_t>(p.rows * p.groups, 8 * int64_t{device.sm_count}));
    c.partials = static_cast<int>(std::min<int64_t>(ceil_div(p.rows, 16), kLoopedPartials));
    return c;
  }
  const int64_t row_bytes = m.cta_columns * p.staged[0];
  if (forward && m.interleaved) {
    norm_detail::units(c, p, device);
    return c;
  }
  if (forward && m.cluster == 1 && p.rows * p.columns * p.staged[0] <= kDirectBytes) {
    const int64_t rows_per_cta = m.in_warp() ? m.warps * c.at_once : 1;
    c.direct = true;
    c.grid = static_cast<int>(ceil_div(p.rows, rows_per_cta)) * p.groups;
    return c;
  }
  // CTAs an SM, as many as registers allow.
  const int per_sm = !m.in_warp()                       ? std::clamp(16 / m.warps, 1, 8)
                     : forward && m.thread_vectors <= 5 ? 2
                                                        : 1;
  // Of dynamic shared memory, of 228 KB in all. Three stages of two rows of 769 columns take 221.
  const int64_t bytes_per_sm = (!m.interleaved ? 200 : m.in_warp() ? 223 : 212) * 1024;
  const int64_t room =
      std::min<int64_t>(bytes_per_sm / per_sm, device.max_shared_bytes_per_cta - kStaticBytes) -
      c.kept_bytes();
  // Results of interleaved rows leave from the stage that x came into: one more is on its way.
  const int fewest = m.interleaved ? 3 : 2;
  if (m.in_warp()) {
    // The backward takes two rows of one vector a lane at once.
    const int64_t step = !forward && m.thread_vectors == 1 && !m.interleaved ? 2 : 1;
    int64_t turns =
        std::clamp<int64_t>(kStageBytes / (row_bytes * c.at_once), step, 8) / step * step;
    if (m.interleaved) turns = 8;
    c.rows_per_stage = static_cast<int>(turns) * c.at_once;
    c.rings = m.warps;
    // Eight odd rows have no end within 16 bytes.
    while (m.interleaved && turns > 1 &&
           fewest * int64_t{norm_detail::stage_bytes(c)} * c.rings > room) {
      turns /= 2;
      c.rows_per_stage = static_cast<int>(turns) * c.at_once;
    }
    // Rows of several fp32 operands.
    while (int64_t{norm_detail::stage_bytes(c)} * c.rings + c.kept_bytes() + kStaticBytes >
           device.max_shared_bytes_per_cta) {
      c.rings = m.warps /= 2;
    }
    // Fewer rows a stage where the ring with the most blocks has 2 % fewer rows then.
    const int64_t rings =
        std::max<int64_t>(per_sm * device.sm_count / p.groups, 1) * int64_t{c.rings};
    const auto most_rows = [&](int64_t stage_rows) {
      return ceil_div(ceil_div(p.rows, stage_rows), rings) * stage_rows;
    };
    for (int64_t fewer = turns - step; 2 * fewer + step - 1 > turns; fewer -= step) {
      if (50 * most_rows(fewer * c.at_once) < 49 * most_rows(c.rows_per_stage)) {
        c.rows_per_stage = static_cast<int>(fewer) * c.at_once;
      }
    }
  } else {
    // The backward's two rows share the exchange of their sums where there is room.
    c.rows_per_stage = forward
                           ? static_cast<int>(std::clamp<int64_t>(kTicketStage / row_bytes, 1, 4))
                       : m.thread_vectors <= NormConfig::kPairVectors && !m.interleaved ? 2
                                                                                        : 1;
    if (fewest * int64_t{norm_detail::stage_bytes(c)} > room) c.rows_per_stage = 1;
    if (!forward) c.at_once = c.rows_per_stage;
  }
  c.stage_bytes = norm_detail::stage_bytes(c);
  const int64_t ring_bytes = int64_t{c.stage_bytes} * c.rings;
  // More would only take room: in flight is enough with fewer the shorter rows are. More on its way
  // than covers memory's latency slows it down: by 4 to 6 % with 100 KB an SM in place of 75.
  constexpr int64_t kInFlight = 80 * 1024;
  const bool three =
      forward ? 3 * ring_bytes * per_sm <= kInFlight : row_bytes >= 2048 && !c.bias_sums;
  // A stage of two rows a lane, for even shares, is half of what others are.
  const bool half = !forward && m.thread_vectors == 1 && c.rows_per_stage == 2 * c.at_once;
  const int in_warp_most = m.interleaved || half ? 4 : three ? 3 : 2;
  const int most = m.in_warp() ? in_warp_most : forward ? 4 : NormConfig::kMaxStages;
  c.stages = static_cast<int>(std::clamp<int64_t>(room / ring_bytes, m.in_warp() ? 1 : 2, most));
  // Wide stages of several wide operands may fill an SM alone.
  if (c.stages == 1 &&
      2 * ring_bytes + c.kept_bytes() + kStaticBytes <= device.max_shared_bytes_per_cta) {
    c.stages = 2;
  }
  const int64_t blocks = ceil_div(p.rows, c.rows_per_stage);
  const int64_t resident = clusters_at_once(per_sm);
  const int64_t teams =
      std::min(ceil_div(blocks, c.rings), std::max<int64_t>(resident / p.groups, 1));
  c.blocks = static_cast<uint32_t>(blocks);
  c.owners = static_cast<uint32_t>(teams * c.rings);
  c.grid = static_cast<int>(teams) * m.cluster * p.groups;
  c.partials = static_cast<int>(teams);
  // SMs are not equally fast. The backward's rows stay where they are: the order of its sums does.
  const int64_t bytes = p.rows * p.columns * p.staged[0];
  const bool uneven = !m.in_warp() && p.groups == 1 && bytes >= kTicketBytes;
  c.by_ticket = forward && uneven && m.cluster == 1;
  c.paced = forward && uneven && !c.by_ticket;
  if (!forward && uneven && !m.interleaved && m.thread_vectors > NormConfig::kPairVectors &&
      bytes >= kPacedBytes) {
    c.lead = 2;
  }
  return c;
}

inline const char* name(NormPass pass) {
  return pass == NormPass::kForward ? "forward" : "backward";
}

// For explain: the config as JSON.
inline std::string to_json(const NormConfig& c) {
  const NormMapping& m = c.mapping;
  const auto number = [](const char* key, int64_t value) {
    return std::string(", \"") + key + "\": " + std::to_string(value);
  };
  std::string text = std::string("{\"kernel\": \"norm_") + name(c.pass) +
                     (c.whole    ? "_whole"
                      : c.wide   ? "_wide"
                      : m.looped ? "_looped"
                                 : "") +
                     "_sm90\"" + number("columns", m.columns);
  if (!m.looped) {
    text += number("cluster", m.cluster) + number("warps", m.warps) +
            number("threads_per_row", m.lanes) + number("vectors_per_thread", m.thread_vectors) +
            number("elements_per_vector", m.vector) + number("idle", m.idle_slots()) +
            ", \"interleaved\": " + (m.interleaved ? "true" : "false");
    if (!c.direct && !c.whole && !c.wide) {
      text += number("rows_per_stage", c.rows_per_stage) + number("stages", c.stages) +
              ", \"by_ticket\": " + (c.by_ticket ? "true" : "false") +
              ", \"paced\": " + (c.paced ? "true" : "false");
    }
  }
  if (c.groups > 1) text += number("groups", c.groups);
  text += number("grid", c.grid);
  if (c.pass == NormPass::kBackward) text += number("partials", c.partials);
  return text + "}";
}

}  // namespace ikbo
