// Which kernel and grid W[M,K] @ E[b][K,N] gets for every row b of a batch, in 16-bit types with
// fp32 sums: a pure function of problem and device, tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <string>

#include "config/column_schedule.h"
#include "config/device_limits.h"

namespace ikbo {

struct LinearCompressionProblem {
  int64_t rows, M, N, K;  // rows: candidates or users
};

// A compiled kernel: two consumers x 64 columns of E by tile_m rows of W, one CTA an SM.
struct LinearCompressionKernel {
  static constexpr int kSwizzleK = 64;     // elements in the 128 bytes of a swizzle span
  static constexpr int kUnitColumns = 64;  // the rows of one wgmma
  static constexpr int kElementBytes = 2;
  static constexpr int kConsumers = 2;
  static constexpr int kWarpGroupThreads = 128;
  static constexpr int kThreads = (kConsumers + 1) * kWarpGroupThreads;
  static constexpr int kRegistersPerSm = 65536;
  // setmaxnreg moves registers to the consumers.
  static constexpr int kOtherRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kEntryRegisters = kRegistersPerSm / kThreads / 8 * 8;
  // Beside a wgmma's sums: ptxas takes n <= 200 (100 sums) where it has 128 registers.
  static constexpr int kRegistersBesideSums = 28;
  static constexpr int kSmallBytes = 2048;      // barriers, bias
  static constexpr int kAlignmentBytes = 1024;  // the 128-byte swizzle repeats every 1024

  int tile_m;
  int tile_k;  // of a step: whole swizzle spans
  int w_stages;
  int e_stages;         // of each consumer
  int staging_buffers;  // of results, shared by the consumers

  constexpr int sums() const { return tile_m * kUnitColumns / kWarpGroupThreads; }  // of a thread
  constexpr int w_bytes() const { return tile_m * tile_k * kElementBytes; }         // of a stage
  constexpr int e_bytes() const { return kUnitColumns * tile_k * kElementBytes; }
  constexpr int staging_bytes() const { return tile_m * kUnitColumns * kElementBytes; }
  constexpr int shared_bytes() const {
    return w_stages * w_bytes() + kConsumers * e_stages * e_bytes() +
           staging_buffers * staging_bytes() + kSmallBytes + kAlignmentBytes;
  }
};

// 192 columns by three consumers would load a fifth less, but leaves no registers: three groups and
// a producer are 16 warps, 128 registers each at entry, and ptxas takes n = 224 from 138 on.
inline constexpr LinearCompressionKernel kLinearCompressionKernels[] = {
    // 433 rows of W are two tiles less 15 rows. With 5 and 3 stages, 10 % slower; 4 and 5 no
    // faster.
    {224, 64, 4, 4, 1},
    {128, 64, 6, 5, 2},
    // Small problems: the most CTAs, and steps of twice the depth, of which half as many wait.
    {64, 128, 4, 4, 2},
};
inline constexpr int kLinearCompressionKernelCount =
    static_cast<int>(std::size(kLinearCompressionKernels));

constexpr bool linear_compression_kernel_is_possible(const LinearCompressionKernel& kernel) {
  constexpr int kMaxSharedBytes = 227 * 1024;
  using K = LinearCompressionKernel;
  return kernel.tile_m % 16 == 0 && kernel.tile_m <= 256 && kernel.tile_k % K::kSwizzleK == 0 &&
         kernel.tile_k <= 256 && kernel.w_stages >= 3 && kernel.e_stages >= 3 &&
         kernel.staging_buffers >= 1 && kernel.staging_buffers <= K::kConsumers &&
         kernel.sums() + K::kRegistersBesideSums <= K::kEntryRegisters &&
         kernel.tile_m * 4 <= K::kSmallBytes / 2 && kernel.shared_bytes() <= kMaxSharedBytes;
}
static_assert(std::all_of(std::begin(kLinearCompressionKernels),
                          std::end(kLinearCompressionKernels),
                          linear_compression_kernel_is_possible));
static_assert(LinearCompressionKernel::kWarpGroupThreads *
                  (LinearCompressionKernel::kOtherRegisters +
                   LinearCompressionKernel::kConsumers *
                       LinearCompressionKernel::kConsumerRegisters) <=
              LinearCompressionKernel::kRegistersPerSm);

struct LinearCompressionConfig {
  int kernel;  // index in kLinearCompressionKernels
  int32_t m_tiles;
  int32_t units_per_row;  // units of 64 columns in N
  ColumnSchedule schedule;
  double clocks;       // estimated for the busiest SM
  double utilisation;  // estimated share of all SMs' tensor peak that is useful work

  int64_t grid() const { return int64_t{m_tiles} * schedule.workers; }
};

namespace linear_compression_model {

// Fitted to the clocks of the slowest CTA on an H200, for results of 433 x 256, 128 x 64 and 64 x
// 64 of 1 to 1024 rows. DRAM isn't in the model: 1024 rows of 128 x 64, whose time it makes, take
// half as long again.
inline constexpr double kFlopsPerClock = 4096;  // dense 16-bit, of an SM
// Into each SM while all of them load, and into one SM at most: what its copy engine takes in.
inline constexpr double kL2BytesPerClock = 55;
inline constexpr double kIngestBytesPerClock = 80;
// From the last wgmma of a step to the first of the next in the same consumer: waits, a release,
// descriptors. To it come the wgmmas before the last two, which are all that wait in line.
inline constexpr double kStepClocks = 250;
// From the sums to memory, through a staging buffer.
inline constexpr double kEpilogueBytesPerClock = 13;
// Of an epilogue, what the other consumer's products don't hide.
inline constexpr double kHiddenShare = 0.25;
// Barriers, tensor maps, the first blocks and the end of the last store.
inline constexpr double kStartClocks = 3700;
// From the end of the users' product to its part in a waiting CTA's staging buffer.
inline constexpr double kHandOverClocks = 2500;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t m_tiles(const LinearCompressionKernel& kernel,
                          const LinearCompressionProblem& problem) {
  return ceil_div(problem.M, kernel.tile_m);
}
constexpr int64_t units_per_row(const LinearCompressionProblem& problem) {
  return ceil_div(problem.N, LinearCompressionKernel::kUnitColumns);
}
constexpr int64_t k_blocks(const LinearCompressionKernel& kernel,
                           const LinearCompressionProblem& problem) {
  return ceil_div(problem.K, kernel.tile_k);
}

// Clocks of worker 0, which has the most to do.
constexpr double clocks(const LinearCompressionKernel& kernel, int64_t m_tiles,
                        const ColumnSchedule& schedule, bool adds_part,
                        const DeviceLimits& device) {
  int64_t tiles = 0;
  for (int c = 0; c < schedule.consumers; ++c) tiles += schedule.tiles(0, c);
  const int64_t rounds = schedule.tiles(0, 0);
  const int64_t steps = schedule.steps(0), blocks_of_e = tiles * schedule.k_blocks;
  const int64_t ctas = m_tiles * schedule.workers;

  const double products = 2.0 * LinearCompressionKernel::kUnitColumns * kernel.tile_k *
                          kernel.tile_m * static_cast<double>(blocks_of_e) / kFlopsPerClock;
  const auto bytes = static_cast<double>(steps * kernel.w_bytes() + blocks_of_e * kernel.e_bytes() +
                                         (adds_part ? tiles * kernel.staging_bytes() : 0));
  // Idle SMs leave their share of L2 to others.
  const double rate = std::min(kIngestBytesPerClock,
                               kL2BytesPerClock * device.sm_count /
                                   static_cast<double>(std::min<int64_t>(ctas, device.sm_count)));
  const double issue = (kernel.tile_k / 16 - 2) * kernel.tile_m / 2.0;
  const double least = (kStepClocks + issue) * static_cast<double>(steps);
  const double loop = std::max({products, bytes / rate, least});

  // Epilogues at the same time wait for one another's staging buffer. Started apart, all but the
  // last are under products.
  const double epilogue = kernel.staging_bytes() / kEpilogueBytesPerClock;
  const double of_round =
      epilogue * std::max(1.0, static_cast<double>(tiles) / rounds / kernel.staging_buffers);
  const double epilogues =
      schedule.apart > 0 ? epilogue + kHiddenShare * epilogue * (tiles - 1) : of_round * rounds;
  // More CTAs than SMs run one after another.
  return (kStartClocks + loop + epilogues) * static_cast<double>(ceil_div(ctas, device.sm_count));
}

}  // namespace linear_compression_model

// Why no kernel takes the problem, or nullptr. Sizes aren't negative.
constexpr const char* linear_compression_decline_reason(const LinearCompressionProblem& problem,
                                                        const DeviceLimits& device) {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
  // So that neither a unit's index nor a CTA's number of steps leaves int32.
  constexpr int64_t kMaxBlocks = int64_t{1} << 30;
  if (problem.K == 0) return "a product over nothing (K is 0)";
  if (problem.N % 8 != 0) return "N is not a multiple of 8, which TMA needs";
  if (std::max({problem.rows, problem.M, problem.N, problem.K}) > kMaxSize) {
    return "a size of 2^31 or more, which TMA coordinates can't hold";
  }
  const int64_t blocks_per_row =
      linear_compression_model::units_per_row(problem) *
      linear_compression_model::ceil_div(problem.K, LinearCompressionKernel::kSwizzleK);
  if (problem.rows != 0 && blocks_per_row > kMaxBlocks / problem.rows) {
    return "embeddings of more than 2^30 blocks of 64 x 64";
  }
  if (device.sm_count < 1) return "a device without SMs";
  for (const LinearCompressionKernel& kernel : kLinearCompressionKernels) {
    if (kernel.shared_bytes() <= device.max_shared_bytes_per_cta) return nullptr;
  }
  return "a device without the shared memory of any kernel";
}

// The config of one kernel for a problem that has an output and no decline reason. adds_part: the
// candidates' product, which adds the users'.
constexpr LinearCompressionConfig linear_compression_config_of(
    int index, const LinearCompressionProblem& problem, bool adds_part,
    const DeviceLimits& device) {
  namespace model = linear_compression_model;
  const LinearCompressionKernel& kernel = kLinearCompressionKernels[index];
  LinearCompressionConfig config{};
  config.kernel = index;
  config.m_tiles = static_cast<int32_t>(model::m_tiles(kernel, problem));
  config.units_per_row = static_cast<int32_t>(model::units_per_row(problem));
  const int64_t units = problem.rows * config.units_per_row;
  config.clocks = std::numeric_limits<double>::infinity();
  // Workers that fill the SMs once; where W's tiles divide them badly, two or three times.
  for (int64_t fills = 1; fills <= 3; ++fills) {
    const int64_t workers = std::clamp<int64_t>(fills * device.sm_count / config.m_tiles, 1, units);
    const ColumnSchedule schedule{static_cast<int32_t>(units), static_cast<int32_t>(workers),
                                  LinearCompressionKernel::kConsumers,
                                  static_cast<int32_t>(model::k_blocks(kernel, problem))};
    const double clocks = model::clocks(kernel, config.m_tiles, schedule, adds_part, device);
    if (clocks < config.clocks) {
      config.schedule = schedule;
      config.clocks = clocks;
    }
  }
  config.utilisation = 2.0 * static_cast<double>(problem.rows) * static_cast<double>(problem.M) *
                       static_cast<double>(problem.N) * static_cast<double>(problem.K) /
                       (model::kFlopsPerClock * config.clocks * device.sm_count);
  return config;
}

namespace linear_compression_model {

// Of both launches, where the candidates' last epilogue waits for the users' product.
constexpr double side_by_side(const LinearCompressionConfig& users,
                              const LinearCompressionConfig& candidates) {
  const double epilogue =
      kLinearCompressionKernels[candidates.kernel].staging_bytes() / kEpilogueBytesPerClock;
  return std::max(candidates.clocks, users.clocks + kHandOverClocks + epilogue);
}

}  // namespace linear_compression_model

// What a call launches.
struct LinearCompressionPlan {
  std::optional<LinearCompressionConfig> users;  // absent where the part is given, or without users
  LinearCompressionConfig candidates;
  int packed_weights = 0;  // weights that the call copies to aligned rows first
};

// The plan with the least estimated clocks; nothing where there is no output (M, N or candidates is
// 0) or where linear_compression_decline_reason has one. users.K is 0 where the part is given.
constexpr std::optional<LinearCompressionPlan> linear_compression_plan(
    const LinearCompressionProblem& candidates, const LinearCompressionProblem& users,
    const DeviceLimits& device) {
  const bool has_output = candidates.rows > 0 && candidates.M > 0 && candidates.N > 0;
  const bool makes_part = users.rows > 0 && users.K > 0;
  if (!has_output || linear_compression_decline_reason(candidates, device) != nullptr ||
      (makes_part && linear_compression_decline_reason(users, device) != nullptr)) {
    return std::nullopt;
  }
  const auto fits = [&](int kernel) {
    return kLinearCompressionKernels[kernel].shared_bytes() <= device.max_shared_bytes_per_cta;
  };
  std::optional<LinearCompressionPlan> best;
  double best_clocks = std::numeric_limits<double>::infinity();
  const auto consider = [&](const LinearCompressionPlan& plan, double clocks) {
    if (clocks < best_clocks) {
      best = plan;
      best_clocks = clocks;
    }
  };
  // What a launch of this many CTAs leaves free.
  const auto beside = [&](int64_t grid) {
    const auto taken = static_cast<int>(std::min<int64_t>(grid, device.sm_count));
    return DeviceLimits{device.sm_count - taken, device.l2_bytes, device.max_shared_bytes_per_cta};
  };
  const bool adds_part = users.rows > 0;
  for (int of_candidates = 0; of_candidates < kLinearCompressionKernelCount; ++of_candidates) {
    if (!fits(of_candidates)) continue;
    const auto alone = linear_compression_config_of(of_candidates, candidates, adds_part, device);
    if (!makes_part) consider({std::nullopt, alone, 0}, alone.clocks);
    for (int of_users = 0; makes_part && of_users < kLinearCompressionKernelCount; ++of_users) {
      if (!fits(of_users)) continue;
      // One after the other, each on all SMs; or side by side, one on what the other leaves.
      const auto first = linear_compression_config_of(of_users, users, false, device);
      const DeviceLimits by_candidates = beside(alone.grid()), by_users = beside(first.grid());
      if (first.grid() > by_candidates.sm_count) {
        consider({first, alone, 0}, first.clocks + alone.clocks);
      }
      if (first.m_tiles <= by_candidates.sm_count) {
        const auto small = linear_compression_config_of(of_users, users, false, by_candidates);
        consider({small, alone, 0}, linear_compression_model::side_by_side(small, alone));
      }
      if (alone.m_tiles <= by_users.sm_count) {
        const auto small =
            linear_compression_config_of(of_candidates, candidates, adds_part, by_users);
        consider({first, small, 0}, linear_compression_model::side_by_side(first, small));
      }
    }
  }
  return best;
}

// "linear_compression_sm90_224x128x64": rows of W, columns of both consumers, K of a step
inline std::string name(const LinearCompressionKernel& kernel) {
  return "linear_compression_sm90_" + std::to_string(kernel.tile_m) + "x" +
         std::to_string(LinearCompressionKernel::kConsumers *
                        LinearCompressionKernel::kUnitColumns) +
         "x" + std::to_string(kernel.tile_k);
}

// For explain: the config as JSON.
inline std::string to_json(const LinearCompressionConfig& config) {
  const LinearCompressionKernel& kernel = kLinearCompressionKernels[config.kernel];
  const ColumnSchedule& schedule = config.schedule;
  return "{\"kernel\": \"" + name(kernel) + "\", \"w_stages\": " + std::to_string(kernel.w_stages) +
         ", \"e_stages\": " + std::to_string(kernel.e_stages) +
         ", \"shared_bytes\": " + std::to_string(kernel.shared_bytes()) +
         ", \"grid\": " + std::to_string(config.grid()) +
         ", \"m_tiles\": " + std::to_string(config.m_tiles) +
         ", \"units\": " + std::to_string(schedule.units) +
         ", \"k_blocks\": " + std::to_string(schedule.k_blocks) +
         ", \"full_rounds\": " + std::to_string(schedule.full_rounds) +
         ", \"leftover_units\": " + std::to_string(schedule.leftover) +
         ", \"estimated_clocks\": " + std::to_string(static_cast<int64_t>(config.clocks)) +
         ", \"estimated_utilisation\": " + std::to_string(config.utilisation) + "}";
}

inline std::string to_json(const LinearCompressionPlan& plan) {
  return "{\"users\": " + (plan.users ? to_json(*plan.users) : "null") +
         ", \"candidates\": " + to_json(plan.candidates) +
         ", \"packed_weights\": " + std::to_string(plan.packed_weights) + "}";
}

}  // namespace ikbo
