// How a product of few tokens is computed, out[M, N] = x[M, K] w[N, K]^T, for one weight or for two
// that share x. Reading the weights is the work, so the kernel is made to keep many bytes of them
// under way on every SM. A pure function of problem and device, tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "config/device_limits.h"

namespace ikbo {

struct WeightStreamProblem {
  int64_t M, N, K;
  int weights;  // 1, or 2 of N features each
};

// A CTA multiplies up to 128 features of one weight, or 64 of each of two, wgmma's rows, with all
// tokens, its columns. With `split` > 1 a cluster of CTAs shares K, and each finishes its part of
// the features.
struct WeightStreamKernel {
  static constexpr int kRows = 128;
  static constexpr int kBoxK = 64;  // 128 bytes: the swizzle span
  static constexpr int kElementBytes = 2;
  static constexpr int kMaxTokens = 64;                   // of a tile
  static constexpr int kMaxSplit = 8;                     // CTAs of a portable cluster
  static constexpr int kConsumerThreads = 128;            // one warp group
  static constexpr int kThreads = kConsumerThreads + 32;  // and the producer's warp
  // Two, so that those of the next kernel read ahead while these end.
  static constexpr int kCtasPerSm = 2;
  // An SM's shared memory is 228 KB, of which each CTA costs 1 KB more than it asks for.
  static constexpr int kSharedBytes = (228 / kCtasPerSm - 1) * 1024;
  static constexpr int kAlignmentBytes = 1024;  // 128-byte swizzle repeats every 1024
  static constexpr int kBarrierBytes = 1024;    // and the biases

  int tokens;
  int weights;

  constexpr int features() const { return kRows / weights; }  // at most
  // Boxes side by side in a stage. Two have the warp group wait and release half as often (gate and
  // up of 16 tokens, 4096 -> 11008: 46.3 to 44.4 us). Beside 64 tokens they leave room for two
  // stages only, and one box, for four, is quicker (47.2 us against 54.2).
  constexpr int boxes() const { return tokens == 16 ? 2 : 1; }
  constexpr int tile_k() const { return boxes() * kBoxK; }
  // Floats from token to token of the sums: no bank is hit twice, neither across nor along.
  constexpr int pitch() const { return features() + 4; }
  constexpr int stage_bytes() const { return (kRows + tokens) * tile_k() * kElementBytes; }
  constexpr int stages() const {
    return (kSharedBytes - kAlignmentBytes - kBarrierBytes) / stage_bytes();
  }
  // Of the sums, which take the ring's place once it has been read.
  constexpr int sums_bytes() const { return weights * tokens * pitch() * 4; }
};

// A tile for 16 tokens leaves room for more stages; for the tensor cores 8 would be no quicker.
inline constexpr int kWeightStreamTokens[] = {16, 64};

constexpr bool weight_stream_kernel_is_possible(const WeightStreamKernel& kernel) {
  return kernel.stages() >= 2 && kernel.sums_bytes() <= kernel.stages() * kernel.stage_bytes();
}
static_assert(weight_stream_kernel_is_possible({16, 1}) &&
              weight_stream_kernel_is_possible({64, 1}));
static_assert(weight_stream_kernel_is_possible({16, 2}) &&
              weight_stream_kernel_is_possible({64, 2}));

struct WeightStreamConfig {
  int tokens;  // of a tile
  int weights;
  int features;         // of a tile: a multiple of 4
  int split;            // CTAs of a cluster, along K: the order of the sums depends on it
  int32_t tiles;        // of so many features
  int32_t token_tiles;  // more than one: of 64 tokens
  int32_t k_steps;      // of all of K
  bool weights_stay;    // in L2, for the next call; else they leave it first
  double clocks;        // estimated
  int64_t ctas() const { return int64_t{tiles} * token_tiles * split; }
};

namespace weight_stream_model {

// An H200's, in clocks of an SM at 1.75 GHz.
inline constexpr double kDramBytesPerClock = 2500;  // of the device
inline constexpr double kL2BytesPerClock = 60;      // into each SM while all of them load
inline constexpr double kIngestBytesPerClock = 60;  // into one SM at most, from L2
inline constexpr double kDramIngestCost = 1.5;      // of what comes from DRAM, times as much
inline constexpr double kLatencyClocks = 1500;      // of a load under load
inline constexpr double kBoxClocks = 475;           // of a warp group: waits, products, release
inline constexpr double kStartClocks = 1500;        // barriers, maps, the first bytes
// A cluster's sums: two meetings, remote loads, and a start that waits for all its places at once
// (512 -> 256 of 500 rows behind another kernel: 4 us more by clusters of eight than by one CTA).
inline constexpr double kMeetClocks = 3000;
inline constexpr double kRemoteBytesPerClock = 32;  // into one SM, of a cluster's other CTAs

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t token_tiles(const WeightStreamProblem& p) {
  return ceil_div(p.M, WeightStreamKernel::kMaxTokens);
}
// Rows of x that a tile loads.
constexpr int64_t token_rows(const WeightStreamProblem& p) {
  return std::min<int64_t>(ceil_div(p.M, 8) * 8, WeightStreamKernel::kMaxTokens);
}

// Clusters that find room at once. Those of more than two CTAs leave SMs over, as they lie within a
// part of the device whose SMs they don't divide: of 66 clusters of four 62 run at once on an H200,
// of 33 of eight 30. The few left over would run when the others have ended, as long again.
constexpr int64_t room(int split, int ctas_per_sm, const DeviceLimits& device) {
  const int64_t clusters = int64_t{ctas_per_sm} * device.sm_count / split;
  return std::max<int64_t>(split <= 2 ? clusters : clusters * 9 / 10, 1);
}

// Features of a tile: as few as let all tiles of a wave find room, so that every place on the
// device, where an SM has one or two, has a CTA.
constexpr int features_of_tile(const WeightStreamProblem& p, int split, int ctas_per_sm,
                               const DeviceLimits& device) {
  constexpr int kStored = 4;   // at once
  constexpr int kFewest = 16;  // below, x would be most of what a CTA loads
  const int most = WeightStreamKernel{0, p.weights}.features();
  const int64_t at_once = std::max<int64_t>(room(split, ctas_per_sm, device) / token_tiles(p), 1);
  const int64_t waves = ceil_div(ceil_div(p.N, most), at_once);
  const int64_t features = ceil_div(ceil_div(p.N, waves * at_once), kStored) * kStored;
  return static_cast<int>(std::clamp<int64_t>(features, kFewest, most));
}

constexpr double clocks(const WeightStreamProblem& p, const WeightStreamKernel& kernel,
                        int features, int split, const DeviceLimits& device) {
  using K = WeightStreamKernel;
  const int64_t ctas = ceil_div(p.N, features) * token_tiles(p) * split;
  const int64_t resident = std::min<int64_t>(ctas, room(split, K::kCtasPerSm, device) * split);
  const auto each_sm = static_cast<double>(ceil_div(resident, device.sm_count));
  const double weight_bytes = features * p.weights * kernel.tile_k() * K::kElementBytes;
  const double bytes =
      weight_bytes + static_cast<double>(token_rows(p)) * kernel.tile_k() * K::kElementBytes;
  // The tiles of the same weights' rows run together: DRAM sends those once.
  const double of_dram = weight_bytes / static_cast<double>(token_tiles(p));
  const auto running = static_cast<double>(resident);
  const double step = std::max({
      (bytes + (kDramIngestCost - 1) * of_dram) * each_sm / kIngestBytesPerClock,
      bytes * running / (kL2BytesPerClock * device.sm_count),
      of_dram * running / kDramBytesPerClock,
      kLatencyClocks / kernel.stages(),
      2.0 * each_sm * kernel.tokens * kernel.boxes(),  // products: 128 rows, 64 deep
      kBoxClocks * kernel.boxes(),
  });
  const auto waves = static_cast<double>(ceil_div(ctas, resident));
  const auto steps = static_cast<double>(ceil_div(ceil_div(p.K, kernel.tile_k()), split));
  const auto tile_tokens = static_cast<double>(std::min<int64_t>(p.M, K::kMaxTokens));
  const double meeting =
      split == 1 ? 0 : kMeetClocks + tile_tokens * features * p.weights * 4 / kRemoteBytesPerClock;
  return waves * (kStartClocks + steps * step + meeting);
}

}  // namespace weight_stream_model

// Why the kernel doesn't take the problem, or nullptr. Sizes aren't negative.
constexpr const char* weight_stream_decline_reason(const WeightStreamProblem& problem,
                                                   const DeviceLimits& device) {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
  if (std::max({problem.M, problem.N, problem.K}) > kMaxSize) {
    return "a size of 2^31 or more, which TMA coordinates can't hold";
  }
  using namespace weight_stream_model;
  const int64_t most_ctas =
      ceil_div(problem.N, WeightStreamKernel::kRows) * WeightStreamKernel::kMaxSplit;
  if (problem.N > 0 && token_tiles(problem) > kMaxSize / most_ctas) {
    return "more than 2^28 output tiles";
  }
  if (WeightStreamKernel::kSharedBytes > device.max_shared_bytes_per_cta || device.sm_count < 1) {
    return "a device without the shared memory or the SMs of any kernel";
  }
  return nullptr;
}

// The config of one split, which is at most the steps of K, with tiles for one or two CTAs an SM.
constexpr WeightStreamConfig weight_stream_config_of(int split, int ctas_per_sm,
                                                     const WeightStreamProblem& problem,
                                                     const DeviceLimits& device) {
  const int tokens = *std::find_if(
      std::begin(kWeightStreamTokens), std::end(kWeightStreamTokens),
      [&](int tile) { return tile >= problem.M || tile == WeightStreamKernel::kMaxTokens; });
  WeightStreamConfig config{};
  config.tokens = tokens;
  config.weights = problem.weights;
  config.features = weight_stream_model::features_of_tile(problem, split, ctas_per_sm, device);
  config.split = split;
  config.tiles = static_cast<int32_t>(weight_stream_model::ceil_div(problem.N, config.features));
  config.token_tiles = static_cast<int32_t>(weight_stream_model::token_tiles(problem));
  const WeightStreamKernel kernel{tokens, problem.weights};
  config.k_steps = static_cast<int32_t>(weight_stream_model::ceil_div(problem.K, kernel.tile_k()));
  config.weights_stay =
      problem.N * problem.K * problem.weights * WeightStreamKernel::kElementBytes <=
      device.l2_bytes / 2;
  config.clocks = weight_stream_model::clocks(problem, kernel, config.features, split, device);
  return config;
}

// The config with the least estimated clocks, for a problem with an output, K at least 1 and no
// decline reason.
constexpr WeightStreamConfig weight_stream_config(
    const WeightStreamProblem& problem, const DeviceLimits& device,
    int most_ctas_per_sm = WeightStreamKernel::kCtasPerSm) {
  WeightStreamConfig best = weight_stream_config_of(1, 1, problem, device);
  const int64_t most_split =
      std::min<int64_t>({WeightStreamKernel::kMaxSplit, best.k_steps, device.sm_count});
  for (int split = 1; split <= most_split; split *= 2) {
    for (int ctas_per_sm = 1; ctas_per_sm <= most_ctas_per_sm; ++ctas_per_sm) {
      const WeightStreamConfig config =
          weight_stream_config_of(split, ctas_per_sm, problem, device);
      if (config.clocks < best.clocks) best = config;
    }
  }
  return best;
}

// For explain: the config as JSON.
inline std::string to_json(const WeightStreamConfig& config) {
  return "{\"kernel\": \"weight_stream_sm90_128x" + std::to_string(config.tokens) + "x" +
         std::to_string(WeightStreamKernel{config.tokens, config.weights}.tile_k()) + "\", " +
         "\"weights\": " + std::to_string(config.weights) +
         ", \"features\": " + std::to_string(config.features) +
         ", \"split_k\": " + std::to_string(config.split) +
         ", \"token_tiles\": " + std::to_string(config.token_tiles) +
         ", \"grid\": " + std::to_string(config.ctas()) +
         ", \"k_steps\": " + std::to_string(config.k_steps) +
         ", \"weights_stay_in_l2\": " + (config.weights_stay ? "true" : "false") +
         ", \"estimated_clocks\": " + std::to_string(static_cast<int64_t>(config.clocks)) + "}";
}

}  // namespace ikbo
