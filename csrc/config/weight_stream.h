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

// A CTA multiplies 64 features of each weight, wgmma's rows, with all tokens, its columns. With
// `split` > 1 a cluster of CTAs shares K, and each finishes its part of the features.
struct WeightStreamKernel {
  static constexpr int kRows = 64;
  static constexpr int kTileK = 64;  // 128 bytes: the swizzle span
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
  static constexpr int kPitch = kRows + 4;      // floats from token to token of the sums: no bank
                                                // is hit twice, neither across nor along

  int tokens;
  int weights;

  constexpr int stage_bytes() const { return (kRows * weights + tokens) * kTileK * kElementBytes; }
  constexpr int stages() const {
    return (kSharedBytes - kAlignmentBytes - kBarrierBytes) / stage_bytes();
  }
  // Of the sums, which take the ring's place once it has been read.
  constexpr int sums_bytes() const { return weights * tokens * kPitch * 4; }
};

// A tile for 16 tokens leaves room for more stages; for the tensor cores 8 would be no quicker.
inline constexpr int kWeightStreamTokens[] = {16, 64};

constexpr bool weight_stream_kernel_is_possible(const WeightStreamKernel& kernel) {
  return kernel.stages() >= 4 && kernel.sums_bytes() <= kernel.stages() * kernel.stage_bytes();
}
static_assert(weight_stream_kernel_is_possible({16, 1}) &&
              weight_stream_kernel_is_possible({64, 1}));
static_assert(weight_stream_kernel_is_possible({16, 2}) &&
              weight_stream_kernel_is_possible({64, 2}));

struct WeightStreamConfig {
  int tokens;  // of a tile
  int weights;
  int split;            // CTAs of a cluster, along K: the order of the sums depends on it
  int32_t tiles;        // of 64 features
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
inline constexpr double kStartClocks = 1500;        // barriers, maps, the first bytes
inline constexpr double kMeetClocks = 1500;         // a cluster's sums: two meetings, remote loads
inline constexpr double kRemoteBytesPerClock = 32;  // into one SM, of a cluster's other CTAs

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t token_tiles(const WeightStreamProblem& p) {
  return ceil_div(p.M, WeightStreamKernel::kMaxTokens);
}
// Rows of x that a tile loads.
constexpr int64_t token_rows(const WeightStreamProblem& p) {
  return std::min<int64_t>(ceil_div(p.M, 8) * 8, WeightStreamKernel::kMaxTokens);
}

constexpr double clocks(const WeightStreamProblem& p, const WeightStreamKernel& kernel, int split,
                        const DeviceLimits& device) {
  using K = WeightStreamKernel;
  const int64_t ctas = ceil_div(p.N, K::kRows) * token_tiles(p) * split;
  const int64_t resident = std::min<int64_t>(ctas, int64_t{K::kCtasPerSm} * device.sm_count);
  const auto each_sm = static_cast<double>(ceil_div(resident, device.sm_count));
  const double weight_bytes = K::kRows * p.weights * K::kTileK * K::kElementBytes;
  const double bytes =
      weight_bytes + static_cast<double>(token_rows(p)) * K::kTileK * K::kElementBytes;
  // The tiles of the same weights' rows run together: DRAM sends those once.
  const double of_dram = weight_bytes / static_cast<double>(token_tiles(p));
  const auto running = static_cast<double>(resident);
  const double step = std::max({
      (bytes + (kDramIngestCost - 1) * of_dram) * each_sm / kIngestBytesPerClock,
      bytes * running / (kL2BytesPerClock * device.sm_count),
      of_dram * running / kDramBytesPerClock,
      kLatencyClocks / kernel.stages(),
      2.0 * each_sm * p.weights * kernel.tokens,  // products: 32 clocks a token and weight, 64 deep
  });
  const auto waves = static_cast<double>(ceil_div(ctas, resident));
  const auto steps = static_cast<double>(ceil_div(ceil_div(p.K, K::kTileK), split));
  const auto tile_tokens = static_cast<double>(std::min<int64_t>(p.M, K::kMaxTokens));
  const double meeting =
      split == 1 ? 0 : kMeetClocks + tile_tokens * K::kRows * p.weights * 4 / kRemoteBytesPerClock;
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

// The config of one split, which is at most the steps of K.
constexpr WeightStreamConfig weight_stream_config_of(int split, const WeightStreamProblem& problem,
                                                     const DeviceLimits& device) {
  const int tokens = *std::find_if(
      std::begin(kWeightStreamTokens), std::end(kWeightStreamTokens),
      [&](int tile) { return tile >= problem.M || tile == WeightStreamKernel::kMaxTokens; });
  WeightStreamConfig config{};
  config.tokens = tokens;
  config.weights = problem.weights;
  config.split = split;
  config.tiles =
      static_cast<int32_t>(weight_stream_model::ceil_div(problem.N, WeightStreamKernel::kRows));
  config.token_tiles = static_cast<int32_t>(weight_stream_model::token_tiles(problem));
  config.k_steps =
      static_cast<int32_t>(weight_stream_model::ceil_div(problem.K, WeightStreamKernel::kTileK));
  config.weights_stay =
      problem.N * problem.K * problem.weights * WeightStreamKernel::kElementBytes <=
      device.l2_bytes / 2;
  config.clocks = weight_stream_model::clocks(problem, {tokens, problem.weights}, split, device);
  return config;
}

// The config with the least estimated clocks, for a problem with an output, K at least 1 and no
// decline reason. One that `follows` a kernel reads weights ahead with every CTA that finds room
// while that one ends: of two about as quick it takes the one with more CTAs, if all find room (64
// tokens, 4096 x 11008: 84 us for gated_mlp with a split of 4, 95 with one of 2).
constexpr WeightStreamConfig weight_stream_config(const WeightStreamProblem& problem,
                                                  const DeviceLimits& device,
                                                  bool follows = false) {
  constexpr double kAboutAsQuick = 1.1;
  const int64_t room = int64_t{WeightStreamKernel::kCtasPerSm} * device.sm_count;
  WeightStreamConfig best = weight_stream_config_of(1, problem, device);
  for (int split = 2;
       split <= std::min<int64_t>({WeightStreamKernel::kMaxSplit, best.k_steps, device.sm_count});
       split *= 2) {
    const WeightStreamConfig config = weight_stream_config_of(split, problem, device);
    const double leeway = follows && config.ctas() <= room ? kAboutAsQuick : 1;
    if (config.clocks < leeway * best.clocks) best = config;
  }
  return best;
}

// For explain: the config as JSON.
inline std::string to_json(const WeightStreamConfig& config) {
  return "{\"kernel\": \"weight_stream_sm90_64x" + std::to_string(config.tokens) + "x64\", " +
         "\"weights\": " + std::to_string(config.weights) +
         ", \"split_k\": " + std::to_string(config.split) +
         ", \"token_tiles\": " + std::to_string(config.token_tiles) +
         ", \"grid\": " + std::to_string(config.ctas()) +
         ", \"k_steps\": " + std::to_string(config.k_steps) +
         ", \"weights_stay_in_l2\": " + (config.weights_stay ? "true" : "false") +
         ", \"estimated_clocks\": " + std::to_string(static_cast<int64_t>(config.clocks)) + "}";
}

}  // namespace ikbo
