// What the backward of a norm runs: a NormConfig, for rows of any address and type, and where the
// layout has kernels of its own for whole, aligned rows of one type, a NormWhole. Pure functions.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "config/norm.h"

namespace ikbo {

// How rows of whole vectors lie in CTAs, one an SM. A team is the threads of a row in a CTA, or a
// warp, which may have several rows side by side.
struct NormWhole {
  // Of the layout; 0 threads where there are no kernels for it.
  int lanes = 0, vectors = 0;
  int rows = 0;       // that a thread works on at once
  int warps = 0;      // of a CTA
  int stages = 0;     // turns whose rows are on chip or on their way
  bool wide = false;  // norm_backward_wide_sm90: sums are taken a row ahead

  // Of the problem.
  int vector = 0;     // elements
  bool sums = false;  // of grad_y are needed: a LayerNorm's, or a bias's
  int cluster = 1;    // CTAs a row
  int teams = 0;      // of a CTA
  int grid = 0;       // CTAs
  int lead = 0;       // turns that a team may be ahead of the average; 0: any
  // Of wide rows, as NormConfig's, but of x and grad_y. To make lines ordinary again takes some 4
  // us, which is more than rows that lie in a CTA gain: they lost up to a tenth.
  bool evict_last = false;
  uint32_t ordinary_from = 0;

  // Few rows: their sums are a kernel's beside the one for grad_x, from x and grad_y themselves.
  bool apart = false;

  constexpr bool has_kernel() const { return warps > 0; }
  constexpr int turn_rows() const { return rows * (lanes < 32 ? 32 / lanes : 1); }
  constexpr int cta_columns() const { return lanes * vectors * vector; }
  constexpr int partials() const { return has_kernel() ? grid / cluster : 0; }
  // Sums of grad_y over rows in shared memory: registers don't hold them.
  constexpr bool has_slots() const { return sums && !wide && vectors * vector >= 24 && lanes > 32; }

  constexpr int stage_bytes() const { return 2 * 16 * 32 * warps * rows * vectors; }
  constexpr int sum_bytes() const {
    return teams * cta_columns() * static_cast<int>(sizeof(float));
  }
  // Stages; in the end sums of a CTA's teams. Then slots, or a row of the weight.
  constexpr int slots_at() const {
    const int all_sums = (sums && !has_slots() ? 2 : 1) * sum_bytes();
    return wide ? stages * stage_bytes() : std::max(stages * stage_bytes(), all_sums);
  }
  // Of exchanges beside them, at most.
  constexpr int static_bytes() const { return wide ? 2048 * teams : 5 * 1024; }
  constexpr int shared_bytes() const {
    return slots_at() + (wide ? lanes * vectors * 16 : has_slots() ? sum_bytes() : 0);
  }
};

namespace norm_detail {

// Layouts that have kernels. Twelve warps have registers for three vectors, sixteen for less; a
// stage more slows short rows down.
inline constexpr std::array<NormWhole, 11> kWholeLayouts = {{
    {16, 1, 2, 16, 2, false},
    {32, 1, 2, 16, 2, false},
    {16, 3, 1, 12, 2, false},
    {32, 2, 1, 16, 2, false},
    {32, 3, 1, 12, 2, false},
    {128, 1, 2, 20, 2, false},
    {256, 1, 2, 16, 2, false},
    {512, 1, 2, 16, 2, false},
    {512, 3, 1, 16, 4, false},
    {256, 4, 1, 16, 3, true},
    {512, 4, 1, 16, 3, true},
}};

}  // namespace norm_detail

// Of a layout that has kernels, else of 0 warps.
constexpr NormWhole norm_whole_layout(int lanes, int vectors, int vector, bool sums) {
  NormWhole w{};
  for (const NormWhole& layout : norm_detail::kWholeLayouts) {
    if (layout.lanes == lanes && layout.vectors == vectors) w = layout;
  }
  w.vector = vector;
  w.sums = sums;
  w.teams = lanes <= 32 ? w.warps : 32 * w.warps / lanes;
  if (w.has_slots()) --w.stages;
  return w;
}

// `config` is norm_config()'s for the problem. `sums`: see NormWhole.
inline NormWhole norm_whole(const NormProblemSize& p, const NormConfig& config, bool sums,
                            const DeviceLimits& device) {
  using norm_detail::ceil_div;
  constexpr int64_t kPacedBytes = int64_t{256} << 20;
  constexpr int64_t kTimesL2 = 16;
  // Up to here x and grad_y are read again in one trip to memory, in less time than a launch takes
  // to follow another. (With 256 rows it takes as long.)
  constexpr int64_t kApartRows = 128, kApartElements = int64_t{1} << 20;
  const NormMapping& m = config.mapping;
  NormWhole w{};
  if (m.looped || m.interleaved || p.groups > 1) return w;
  w.apart = p.rows <= kApartRows && p.rows * p.columns <= kApartElements;
  // grad_residual_out goes through a ring.
  if (p.staged[1] != p.staged[0] || p.staged[2] != 0) return w;
  if (m.cluster > 1 && m.thread_vectors < 4) return w;
  const bool apart = w.apart;
  w = norm_whole_layout(m.lanes, m.thread_vectors, m.vector, sums);
  w.apart = apart;
  if (!w.has_kernel()) return w;
  w.cluster = m.cluster;
  // Clusters of 4 and more leave SMs over, as in norm_config().
  int64_t clusters = device.sm_count / w.cluster;
  if (w.cluster >= 4) clusters = int64_t{2} * device.sm_count / w.cluster * 10 / 11 / 2;
  const int64_t blocks = ceil_div(ceil_div(p.rows, w.turn_rows()), w.teams);
  clusters = std::clamp<int64_t>(blocks, 1, std::max<int64_t>(clusters, 1));
  w.grid = static_cast<int>(clusters) * w.cluster;
  if (w.shared_bytes() + w.static_bytes() > device.max_shared_bytes_per_cta) return NormWhole{};
  const int64_t x_bytes = p.rows * p.columns * p.staged[0];
  if (w.wide && x_bytes >= kPacedBytes) w.lead = w.cluster <= 2 ? 1 : 2;
  w.evict_last = w.wide && 2 * x_bytes > kTimesL2 * device.l2_bytes;
  const int64_t l2_rows = device.l2_bytes / (2 * p.columns * p.staged[0]);
  w.ordinary_from = static_cast<uint32_t>(p.rows - (w.evict_last ? l2_rows : 0));
  return w;
}

struct NormBackwardConfig {
  NormConfig rings;
  NormWhole whole;

  int partials() const { return std::max(rings.partials, whole.partials()); }
};

inline NormBackwardConfig norm_backward_config(const NormProblemSize& p,
                                               const DeviceLimits& device) {
  const NormConfig rings = norm_config(NormPass::kBackward, p, device);
  return {rings, norm_whole(p, rings, p.layer || p.bias_sums, device)};
}

inline std::string to_json(const NormBackwardConfig& c) {
  std::string text = to_json(c.rings);
  const NormWhole& w = c.whole;
  if (!w.has_kernel() && !w.apart) return text;
  const auto number = [](const char* key, int value) {
    return std::string("\"") + key + "\": " + std::to_string(value) + ", ";
  };
  text.pop_back();
  text += ", \"whole_rows\": {";
  if (w.has_kernel()) {
    text += number("warps", w.warps) + number("teams", w.teams) + number("rows", w.rows) +
            number("stages", w.stages) + number("grid", w.grid) + number("partials", w.partials());
  }
  return text + "\"sums_apart\": " + (w.apart ? "true" : "false") + "}}";
}

}  // namespace ikbo
