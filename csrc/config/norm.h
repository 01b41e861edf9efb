// How the norm kernels lay a row over threads: a pure function of the row's length, tested on the
// CPU. The order of a row's sums follows from it, so a row's bits don't depend on the row count.
//
// A row is cut into vectors of 16 bytes of x. Up to kWarpVectors of them a warp holds the row, or
// several rows side by side; longer rows take a CTA, and longer ones yet a cluster of CTAs that
// each hold a span of columns. Rows beyond the largest cluster are read several times (`looped`).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "config/device_limits.h"

namespace ikbo {

enum class NormPass { kForward, kBackward };

struct NormMapping {
  static constexpr int kMaxCluster = 16;
  static constexpr int kMaxThreadVectors = 9;
  // A thread holds up to 1, 4 or 9 vectors, each a kernel. CTAs stay with 4 but in the backward of
  // the longest rows.
  static constexpr int kCtaThreadVectors = 4;
  static constexpr int64_t kWarpVectors = 32 * kMaxThreadVectors;
  static constexpr int64_t kShortVectors = 32 * kCtaThreadVectors;

  bool looped;
  int64_t columns;
  int vector;           // elements of a vector
  int cluster;          // CTAs a row
  int warps;            // of a CTA
  int row_warps;        // of them on a row: 1, or all
  int lanes;            // threads a row has in a CTA
  int thread_vectors;   // vectors a thread has of a row
  int kernel_vectors;   // what the kernel is compiled for: at least thread_vectors
  int64_t cta_columns;  // columns a CTA has of a row; the last of a cluster may have fewer

  int rows_per_warp() const { return lanes < 32 ? 32 / lanes : 1; }

  // Threads' slots that hold no column, of all CTAs of a row.
  int64_t idle_slots() const {
    return looped ? 0 : int64_t{cluster} * lanes * thread_vectors * vector - columns;
  }

  // The column of element e of vector v of a row's thread; -1 where there is none.
  int64_t column(int cta, int thread, int v, int e) const {
    const int64_t inside = (int64_t{v} * lanes + thread) * vector + e;
    const int64_t column = cta * cta_columns + inside;
    return inside < cta_columns && column < columns ? column : -1;
  }
};

namespace norm_detail {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Lanes (a power of two) and vectors a lane for a row within a warp: fewest idle, then most lanes.
inline void fit_in_warp(int64_t vectors, NormMapping& m) {
  int64_t fewest = INT64_MAX;
  for (int lanes = 32; lanes >= 1; lanes /= 2) {
    const int64_t each = ceil_div(vectors, lanes);
    if (each > NormMapping::kMaxThreadVectors || lanes * each - vectors >= fewest) continue;
    fewest = lanes * each - vectors;
    m.lanes = lanes;
    m.thread_vectors = static_cast<int>(each);
  }
}

// Warps and vectors a thread for a row's span of `packets`, 32 vectors each: fewest idle, then the
// fewest vectors a thread. Eight warps where those suffice.
inline void fit_in_cta(int64_t packets, NormMapping& m) {
  const int most = packets <= 8 * NormMapping::kCtaThreadVectors ? 8 : 16;
  int64_t fewest = INT64_MAX;
  for (int each = 1; each <= NormMapping::kCtaThreadVectors; ++each) {
    const int64_t warps = ceil_div(packets, each);
    if (warps > most || warps * each - packets >= fewest) continue;
    fewest = warps * each - packets;
    m.row_warps = static_cast<int>(warps);
    m.thread_vectors = each;
  }
}

}  // namespace norm_detail

// `element_bytes` of x; columns >= 1.
inline NormMapping norm_mapping(NormPass pass, int64_t columns, int element_bytes) {
  using norm_detail::ceil_div;
  NormMapping m{};
  m.columns = columns;
  m.vector = 16 / element_bytes;
  m.cluster = 1;
  m.cta_columns = columns;
  const int64_t vectors = ceil_div(columns, m.vector), packets = ceil_div(vectors, 32);
  if (vectors <= NormMapping::kWarpVectors) norm_detail::fit_in_warp(vectors, m);
  const bool in_warp = vectors <= NormMapping::kShortVectors ||
                       (m.lanes > 0 && int64_t{m.lanes} * m.thread_vectors < 32 * packets);
  if (in_warp) {
    m.row_warps = 1;
    m.warps =
        pass == NormPass::kBackward && m.thread_vectors <= NormMapping::kCtaThreadVectors ? 12 : 8;
  } else {
    // The backward keeps sums a column in registers, so a CTA takes half as much.
    const int64_t half = 8 * NormMapping::kCtaThreadVectors, most = 2 * half;
    int64_t a_cta = pass == NormPass::kForward ? most : half;
    const bool over = packets > a_cta * NormMapping::kMaxCluster;
    if (over) a_cta = most;
    while (a_cta * m.cluster < packets) m.cluster *= 2;
    if (m.cluster > NormMapping::kMaxCluster) {
      m.looped = true;
      m.cluster = 1;
      m.warps = m.row_warps = 16;
      m.lanes = 32 * m.warps;
      return m;
    }
    const int64_t span = ceil_div(packets, m.cluster);
    if (over && pass == NormPass::kBackward) {
      m.row_warps = 8;  // with more registers each
      m.thread_vectors = static_cast<int>(ceil_div(span, 8));
    } else {
      norm_detail::fit_in_cta(span, m);
    }
    m.warps = m.row_warps;
    m.lanes = 32 * m.warps;
    if (m.cluster > 1) m.cta_columns = span * 32 * m.vector;
  }
  m.kernel_vectors = m.thread_vectors == 1                                ? 1
                     : m.thread_vectors <= NormMapping::kCtaThreadVectors ? 4
                                                                          : 9;
  return m;
}

// A mapping, and what depends on the rest of the problem: never the order of a row's sums.
struct NormConfig {
  static constexpr int kMaxStages = 6;
  static constexpr int kSpanPadding = 32;  // a staged span begins and ends at multiples of 16 bytes

  NormPass pass;
  NormMapping mapping;
  int rows_per_stage;  // of a warp, or of the CTA
  int stages;
  int stage_bytes;  // of a ring; a warp has its own, or the CTA
  int rings;        // a CTA
  int grid;         // CTAs
  int partials;     // rows of the sums over rows: the backward's, one a CTA or cluster
  bool by_ticket;   // rows from a counter: whichever CTA is free

  int shared_bytes() const { return stage_bytes * stages * rings; }
};

struct NormProblemSize {
  int64_t rows, columns;
  int element_bytes;    // of x
  int staged_bytes;     // of an element of all staged operands together: x, residual; x, grads
  int staged_operands;  // how many
  bool bias_sums;       // backward: whether grad_bias is wanted
};

// Bytes one row takes in a stage, of all operands, over-estimated.
inline int64_t norm_staged_row_bytes(const NormProblemSize& p, const NormMapping& m) {
  return m.cta_columns * p.staged_bytes + int64_t{NormConfig::kSpanPadding} * p.staged_operands;
}

inline NormConfig norm_config(NormPass pass, const NormProblemSize& p, const DeviceLimits& device) {
  using norm_detail::ceil_div;
  // What a ring leaves of an SM's memory serves as L1: weight and bias are read through it.
  constexpr int64_t kRingBytesPerSm = 144 * 1024;
  constexpr int64_t kWarpStageBytes = 2048;
  constexpr int64_t kStaticBytes = 4096;  // more than the kernels' barriers and sums take
  // From here on that SMs are not equally fast is worth a counter, which costs its clearing.
  constexpr int64_t kTicketBytes = int64_t{32} << 20;
  const bool forward = pass == NormPass::kForward;
  NormConfig c{};
  c.pass = pass;
  c.mapping = norm_mapping(pass, p.columns, p.element_bytes);
  NormMapping& m = c.mapping;
  const bool warp_rows = !m.looped && m.lanes <= 32;
  // The backward of a CTA loads a stage's next row while it works on the row after.
  const int least = forward || warp_rows ? 1 : 2;
  if (least * norm_staged_row_bytes(p, m) + kStaticBytes > device.max_shared_bytes_per_cta) {
    m.looped = true;
  }
  if (m.looped) {
    constexpr int kLoopedPartials = 128;
    m.warps = 16;
    c.grid = static_cast<int>(std::min<int64_t>(p.rows, 8 * int64_t{device.sm_count}));
    c.partials = static_cast<int>(std::min<int64_t>(ceil_div(p.rows, 16), kLoopedPartials));
    return c;
  }
  int per_sm = 1;
  if (warp_rows) {
    // As many as registers allow.
    if (forward) per_sm = m.kernel_vectors == 9 ? 1 : m.kernel_vectors == 4 ? 2 : 4;
    const int at_once = m.rows_per_warp();
    const int64_t row_bytes = p.columns * p.element_bytes;
    const int64_t groups = std::clamp<int64_t>(kWarpStageBytes / (row_bytes * at_once), 1, 8);
    c.rows_per_stage = static_cast<int>(groups) * at_once;
    c.rings = m.warps;
  } else {
    // Sums of grad_bias take the registers of a second CTA.
    const int warps_per_sm = p.bias_sums && m.kernel_vectors > 1 ? 12 : 16;
    per_sm = m.kernel_vectors == 9 ? 1 : std::clamp(warps_per_sm / m.warps, 1, 4);
    c.rows_per_stage = 1;
    c.rings = 1;
  }
  const int64_t stage = norm_staged_row_bytes(p, m) * c.rows_per_stage;
  c.stage_bytes = static_cast<int>(ceil_div(stage, 128) * 128);
  // Rows of several fp32 operands.
  while (int64_t{c.stage_bytes} * c.rings + kStaticBytes > device.max_shared_bytes_per_cta) {
    c.rings = m.warps /= 2;
  }
  const int64_t most = warp_rows ? (forward ? 3 : 2) : (forward ? 4 : NormConfig::kMaxStages);
  const int64_t room = kRingBytesPerSm / per_sm / (int64_t{c.stage_bytes} * c.rings);
  c.stages = static_cast<int>(std::clamp<int64_t>(room, least, most));
  // A wide stage of several wide operands may fill an SM alone; small rings may need a second
  // stage.
  if (c.stages == 1 &&
      2 * int64_t{c.stage_bytes} * c.rings + kStaticBytes <= device.max_shared_bytes_per_cta) {
    c.stages = 2;
  }
  const int64_t blocks = ceil_div(ceil_div(p.rows, c.rows_per_stage), c.rings);
  // Clusters of 4 and more leave SMs over: 30 of 4, 15 of 8, 7 of 16 fit on 132 SMs.
  int64_t resident = per_sm * device.sm_count / m.cluster;
  if (m.cluster >= 4) resident = resident * 10 / 11;
  const int64_t teams = std::min(blocks, std::max<int64_t>(resident, 1));
  c.grid = static_cast<int>(teams) * m.cluster;
  c.partials = static_cast<int>(teams);
  c.by_ticket = forward && !warp_rows && m.cluster == 1 &&
                p.rows * p.columns * p.element_bytes >= kTicketBytes;
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
                     (m.looped ? "_looped" : "") + "_sm90\"" + number("columns", m.columns);
  if (!m.looped) {
    text += number("cluster", m.cluster) + number("warps", m.warps) +
            number("threads_per_row", m.lanes) + number("vectors_per_thread", m.thread_vectors) +
            number("elements_per_vector", m.vector) + number("idle", m.idle_slots()) +
            number("rows_per_stage", c.rows_per_stage) + number("stages", c.stages) +
            ", \"by_ticket\": " + (c.by_ticket ? "true" : "false");
  }
  text += number("grid", c.grid);
  if (c.pass == NormPass::kBackward) text += number("partials", c.partials);
  return text + "}";
}

}  // namespace ikbo
