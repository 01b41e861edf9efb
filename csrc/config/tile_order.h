// Which output tile a linear index means, and which indices a CTA of a persistent grid takes.
// Used by host and device: integers only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "config/fast_divisor.h"

namespace ikbo {

// The indices of one batch item's tiles go through groups of neighbouring clusters along one
// dimension (M or N). Within a group the index walks along the other dimension, and at each place
// there through the whole group. So CTAs that run together form a rectangle, share its rows of A
// and rows of B in L2, and a group's own operand is used again as they move on.
struct RasterOrder {
  bool groups_along_n;
  int group;  // clusters in a group; the last group may have fewer
};

struct TileGrid {
  int32_t m_tiles;
  int32_t n_tiles;
  int32_t batch;
  int cluster_m;  // CTAs of a cluster take neighbouring tiles along M; 1 or 2

  constexpr int32_t m_clusters() const { return (m_tiles + cluster_m - 1) / cluster_m; }
};

struct TileCoordinates {
  int32_t batch;
  int32_t m_tile;  // may be m_tiles where m_tiles is odd and the cluster has two CTAs: padding
  int32_t n_tile;
};

// Neither a tile index nor one two grids further on leaves int32.
inline constexpr int64_t kMaxTiles = int64_t{1} << 30;

class TileOrder {
 public:
  constexpr TileOrder() = default;
  // 1 <= m_tiles, n_tiles, batch, group; at most kMaxTiles tiles, padding included.
  constexpr TileOrder(const TileGrid& grid, const RasterOrder& raster)
      : two_ctas_(grid.cluster_m == 2), groups_along_n_(raster.groups_along_n) {
    const int32_t m_clusters = grid.m_clusters();
    const int32_t grouped = groups_along_n_ ? grid.n_tiles : m_clusters;
    const int32_t group = std::min<int32_t>(raster.group, grouped);
    walked_ = groups_along_n_ ? m_clusters : grid.n_tiles;
    last_group_ = (grouped - 1) / group;
    per_batch_ = FastDivisor(m_clusters * grid.n_tiles);
    per_group_ = FastDivisor(group * walked_);
    group_ = FastDivisor(group);
    last_group_size_ = FastDivisor(grouped - last_group_ * group);
    tiles_ = m_clusters * grid.n_tiles * grid.batch * grid.cluster_m;
  }

  // Tiles of all batch items, padding included. CTAs of a cluster have neighbouring indices.
  constexpr int32_t tiles() const { return tiles_; }

  constexpr TileCoordinates at(int32_t tile) const {
    const int32_t cluster = two_ctas_ ? tile >> 1 : tile;
    const int32_t batch = per_batch_.divide(cluster);
    const int32_t in_batch = per_batch_.remainder(cluster, batch);
    const int32_t group = per_group_.divide(in_batch);
    const int32_t in_group = per_group_.remainder(in_batch, group);
    const FastDivisor& size = group == last_group_ ? last_group_size_ : group_;
    int32_t along_walk = size.divide(in_group);
    const int32_t along_group = group * group_.divisor() + size.remainder(in_group, along_walk);
    // Every other group walks back: it begins where the last one ended, on operands still in L2.
    if ((group & 1) != 0) along_walk = walked_ - 1 - along_walk;
    const int32_t m_cluster = groups_along_n_ ? along_walk : along_group;
    const int32_t n_tile = groups_along_n_ ? along_group : along_walk;
    return {batch, two_ctas_ ? 2 * m_cluster + (tile & 1) : m_cluster, n_tile};
  }

 private:
  FastDivisor per_batch_;  // clusters in a batch item
  FastDivisor per_group_;  // clusters in a group, over the whole walk
  FastDivisor group_;      // clusters at one place of the walk
  FastDivisor last_group_size_;
  int32_t last_group_ = 0;
  int32_t walked_ = 0;
  int32_t tiles_ = 0;
  bool two_ctas_ = false;
  bool groups_along_n_ = false;
};

// The static persistent schedule: tile indices first, first + stride, ... below tiles.
//   for (TileSchedule schedule = ...; schedule.has_tile(); schedule.next()) { schedule.tile() ... }
class TileSchedule {
 public:
  // Every tile of a CTA: what its producer loads, and what cooperating consumers compute.
  static constexpr TileSchedule of_cta(int32_t cta, int32_t grid, int32_t tiles) {
    return {cta, grid, tiles};
  }
  // The tiles of one of two ping-pong consumers: every other tile of its CTA.
  static constexpr TileSchedule of_consumer(int32_t cta, int consumer, int32_t grid,
                                            int32_t tiles) {
    return {cta + consumer * grid, 2 * grid, tiles};
  }

  constexpr bool has_tile() const { return tile_ < tiles_; }
  constexpr int32_t tile() const { return tile_; }
  constexpr void next() { tile_ += stride_; }

 private:
  constexpr TileSchedule(int32_t first, int32_t stride, int32_t tiles)
      : tile_(first), stride_(stride), tiles_(tiles) {}

  int32_t tile_;
  int32_t stride_;
  int32_t tiles_;
};

// How a problem's tiles stand to the device, for choose_raster_order.
struct RasterProblem {
  int64_t m_clusters;
  int64_t n_tiles;
  int64_t m_panel_bytes;      // of A, what one cluster reads
  int64_t n_panel_bytes;      // of B, likewise
  int64_t resident_clusters;  // that run at once
  int64_t l2_bytes;
};

struct RasterCost {
  double dram_bytes;  // read for one batch item
  double wave_bytes;  // distinct operand bytes of the clusters that run at once

  constexpr bool operator<(const RasterCost& other) const {
    return dram_bytes != other.dram_bytes ? dram_bytes < other.dram_bytes
                                          : wave_bytes < other.wave_bytes;
  }
};

// CTAs that run together keep nearly in step along K, so a wave reads each operand row from DRAM
// once. From wave to wave the group's operand lives on if all that a wave reads fits in L2; of
// that, half is counted, because either partition of a Hopper L2 holds its own copy of what its SMs
// read.
constexpr RasterCost raster_cost(const RasterProblem& problem, const RasterOrder& raster) {
  const bool along_n = raster.groups_along_n;
  const int64_t grouped = along_n ? problem.n_tiles : problem.m_clusters;
  const int64_t walked = along_n ? problem.m_clusters : problem.n_tiles;
  const double grouped_panel = along_n ? problem.n_panel_bytes : problem.m_panel_bytes;
  const double walked_panel = along_n ? problem.m_panel_bytes : problem.n_panel_bytes;
  const double groups = (grouped + raster.group - 1) / raster.group;
  const double capacity = problem.l2_bytes / 2.0;

  // A wave begins anywhere: on average it touches one place or group more than it is long.
  const double resident = problem.resident_clusters;
  const double waves_of_walk = static_cast<double>(raster.group) * walked / resident;
  const double places = std::min<double>(resident / raster.group + 1, walked);
  const double panels = std::min<double>(raster.group * (1 / waves_of_walk + 1), grouped);
  const double most_panels =
      std::min<double>(raster.group * (static_cast<int64_t>(1 / waves_of_walk) + 2), grouped);

  RasterCost cost{};
  cost.wave_bytes = panels * grouped_panel + places * walked_panel;
  const bool keeps_group = cost.wave_bytes <= capacity;
  const bool keeps_walk = most_panels * grouped_panel + walked * walked_panel <= capacity;
  cost.dram_bytes = grouped * grouped_panel * (keeps_group ? 1.0 : std::max(1.0, waves_of_walk)) +
                    walked * walked_panel * (keeps_walk ? 1.0 : groups);
  return cost;
}

// The order with the least DRAM traffic, and among equals the one with the squarest waves.
constexpr RasterOrder choose_raster_order(const RasterProblem& problem) {
  constexpr int64_t kMaxGroup = 16;
  RasterOrder best{false, 1};
  RasterCost best_cost = raster_cost(problem, best);
  for (const bool along_n : {false, true}) {
    const int64_t grouped = along_n ? problem.n_tiles : problem.m_clusters;
    for (int group = 1; group <= std::min(grouped, kMaxGroup); ++group) {
      const RasterOrder raster{along_n, group};
      const RasterCost cost = raster_cost(problem, raster);
      if (cost < best_cost) {
        best = raster;
        best_cost = cost;
      }
    }
  }
  return best;
}

}  // namespace ikbo
