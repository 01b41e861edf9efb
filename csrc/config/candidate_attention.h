// Which kernel candidate attention gets: a pure function of problem and device, tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>

#include "config/device_limits.h"

namespace ikbo {

// Two consumers x 64 query rows of one user and head by tile_n keys, one CTA an SM.
struct AttentionKernel {
  static constexpr int kConsumers = 2;
  static constexpr int kConsumerRows = 64;  // of one wgmma
  static constexpr int kTileM = kConsumers * kConsumerRows;
  static constexpr int kElementBytes = 2;
  static constexpr int kWarpGroupThreads = 128;
  static constexpr int kRegistersPerSm = 65536;
  static constexpr int kOtherRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kSmallBytes = 1024;      // barriers, tile descriptors
  static constexpr int kAlignmentBytes = 1024;  // the 128-byte swizzle repeats every 1024

  int head_qk;  // head size of queries and keys; smaller ones are filled with zeros
  int head_v;
  int tile_n;
  int q_slots;  // of each consumer: with two, the next tile's q is there before this one is done
                // with
  int stages;   // of K and of V
  // Tiles that don't fill a round are shared out by blocks of keys (config/shared_blocks.h).
  bool shares_keys = false;
  // Of every four groups of eight keys, how many get their exponentials from a polynomial.
  int polynomials = 0;
  // The second product is waited for before the exponentials: then these, sums and rounding are one
  // block of instructions, which ptxas interleaves.
  bool waits_early = false;
  int tile_m = kTileM;  // or 64: one consumer's
  // Of tiles cut into parts: a cluster meets without a fence (hand_over_in_cluster()).
  bool light_clusters = false;
  bool longest_first = false;  // of 32 users at a time
  // A block with at most half of the keys makes half of the scores, unless it is a tile's first.
  bool half_blocks = false;
  int consumers = kConsumers;  // tile_m is 64 for each
  int max_parts = 8;           // CTAs of a cluster; more than 8 aren't portable
  int min_part_tiles = 2;

  constexpr int q_bytes() const { return kConsumerRows * head_qk * kElementBytes; }  // of a slot
  constexpr int k_bytes() const { return tile_n * head_qk * kElementBytes; }         // of a stage
  constexpr int v_bytes() const { return tile_n * head_v * kElementBytes; }
  constexpr int shared_bytes() const {
    return consumers * q_slots * q_bytes() + stages * (k_bytes() + v_bytes()) + kSmallBytes +
           kAlignmentBytes;
  }
  constexpr int threads() const { return (consumers + 1) * kWarpGroupThreads; }
  // Of a thread.
  constexpr int consumer_registers() const { return consumers == 2 ? kConsumerRegisters : 160; }
  constexpr int other_registers() const { return consumers == 2 ? kOtherRegisters : 32; }
  // fp32 scores and outputs, and 16-bit weights, that a consumer thread holds.
  constexpr int scores() const { return tile_n / 2; }
  constexpr int outputs() const { return head_v / 2; }
  constexpr int weights() const { return tile_n / 4; }
};

inline constexpr AttentionKernel kAttentionKernels[] = {
    {64, 64, 128, 2, 4},
    {128, 128, 128, 2, 2},
    // Steps of larger heads are long enough to load q in. With fewer keys, products would be bound
    // by reads of q from shared memory.
    {192, 128, 128, 1, 2},
    {256, 256, 80, 1, 2},
#ifdef IKBO_ATTENTION_VARIANTS
    // To be measured, chosen by IKBO_ATTENTION_KERNEL, from 4 on.
    {128, 128, 128, 2, 2, true},
    {64, 64, 128, 2, 4, false, 0, true},
    {64, 64, 128, 2, 4, false, 1, true},
    {64, 64, 128, 2, 4, false, 1, false},
    {128, 128, 128, 2, 2, false, 1, true},
    {128, 128, 128, 2, 2, false, 1, false},
    {128, 128, 128, 2, 2, false, 0, false, 128, true},  // 10
    {128, 128, 128, 2, 2, false, 0, false, 64, true},
    {128, 128, 128, 2, 2, false, 0, false, 128, false, true},
    {128, 128, 96, 2, 3, false, 0, false, 128, false, true},
    {128, 128, 64, 2, 4, false, 0, false, 128, false, true},
    {128, 128, 96, 2, 3},  // 15
    {128, 128, 128, 2, 2, false, 0, false, 128, false, true, true},
    {64, 64, 128, 2, 4, false, 0, false, 192, false, false, false, 3},
    {64, 64, 128, 2, 4, false, 1, true, 192, false, false, false, 3},
    {64, 64, 128, 2, 4, false, 0, true, 192, false, false, false, 3},
    {64, 64, 112, 2, 4, false, 0, false, 192, false, false, false, 3},  // 20
    {128, 128, 128, 2, 2, false, 0, false, 128, true, false, false, 2, 16, 1},
    // The two of few tiles again, with smaller blocks.
    {128, 128, 64, 2, 4, false, 0, false, 128, false, false, false, 2, 8, 4},
    {128, 128, 64, 2, 4, false, 0, false, 128, true, false, false, 2, 8, 4},
    {128, 128, 128, 2, 2, false, 0, false, 64, true, false, false, 2, 8, 2},
    {128, 128, 128, 2, 2, false, 0, false, 128, false, false, false, 2, 1},  // 25: never cut
    {128, 128, 64, 2, 4, false, 0, false, 128, false, false, false, 2, 1},
#endif
};
inline constexpr int kAttentionKernelsTaken = 4;  // by themselves
inline constexpr int kAttentionKernelCount = static_cast<int>(std::size(kAttentionKernels));

constexpr bool attention_kernel_is_possible(const AttentionKernel& kernel) {
  constexpr int kMaxSharedBytes = 227 * 1024;
  // Beside them addresses, running maxima and sums.
  const int kept_free = kernel.consumers == 2 ? 40 : 32;
  return kernel.head_qk % 64 == 0 && kernel.head_v % 64 == 0 && kernel.tile_n % 16 == 0 &&
         kernel.head_v <= kernel.head_qk &&
         kernel.scores() + kernel.outputs() + kernel.weights() + kept_free <=
             kernel.consumer_registers() &&
         kernel.tile_m <= kernel.consumers * AttentionKernel::kConsumerRows &&
         AttentionKernel::kWarpGroupThreads *
                 (kernel.other_registers() + kernel.consumers * kernel.consumer_registers()) <=
             AttentionKernel::kRegistersPerSm &&
         kernel.shared_bytes() <= kMaxSharedBytes;
}
static_assert(std::all_of(std::begin(kAttentionKernels), std::end(kAttentionKernels),
                          attention_kernel_is_possible));

struct AttentionProblem {
  int64_t B, S, H, D, Dv, U;
  int64_t L;            // keys of a user, or their mean
  bool lengths_differ;  // may do so from user to user
  bool ordered;         // candidates aren't grouped by user: there is an order
#ifdef IKBO_ATTENTION_VARIANTS
  int forced = -1;
#endif
};

struct AttentionConfig {
  static constexpr int kMaxParts = 8;  // CTAs of a cluster

  int kernel;          // index in kAttentionKernels
  int parts;           // into which each tile's keys are cut, for CTAs of a cluster
  int ctas;            // persistent, at most one an SM
  int rows_together;   // of a consumer's 64 query rows, how many lie side by side for sure
  bool tickets;        // a CTA that is free takes the next tile; else every ctas-th from its own on
  int expected_tiles;  // of a user and head, whose first reads can be guessed; 0: they can't
  int shared_blocks;   // of a tile, where a kernel that shares keys does so; or 0
};

// Why no kernel takes the problem, or nullptr. Sizes aren't negative.
constexpr const char* attention_decline_reason(const AttentionProblem& problem,
                                               const DeviceLimits& device) {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
  if (problem.D % 8 != 0 || problem.Dv % 8 != 0 || problem.Dv == 0) {
    return "head sizes that are not multiples of 8, which TMA needs";
  }
  // Nor may a run's end, rounded up to tiles, leave int32.
  if (problem.S != 0 && problem.B > (kMaxSize - AttentionKernel::kTileM) / problem.S) {
    return "2^31 query rows or more, which TMA coordinates can't hold";
  }
  // Nor the number of tiles, of all heads and parts, one grid further on.
  const int64_t tiles = problem.B * problem.S / AttentionKernel::kTileM + problem.U + 1;
  if (problem.H > kMaxSize / 2 / tiles / AttentionConfig::kMaxParts) return "2^24 tiles or more";
  const AttentionKernel& largest = kAttentionKernels[kAttentionKernelsTaken - 1];
  if (problem.D > largest.head_qk || problem.Dv > largest.head_v) return "heads larger than 256";
  if (largest.shared_bytes() > device.max_shared_bytes_per_cta) {
    return "a device without the shared memory of the kernels";
  }
  return nullptr;
}

// For a problem without a decline reason: the smallest heads that hold the problem's.
constexpr AttentionConfig attention_config(const AttentionProblem& problem,
                                           const DeviceLimits& device) {
  constexpr int kMaxSharedBlocks = 1 << 14;  // times two rounds of tiles it stays in int32
  AttentionConfig config{};
  while (kAttentionKernels[config.kernel].head_qk < problem.D ||
         kAttentionKernels[config.kernel].head_v < problem.Dv) {
    ++config.kernel;
  }
#ifdef IKBO_ATTENTION_VARIANTS
  if (problem.forced >= 0) config.kernel = problem.forced;
#endif
  // The run of each user that has candidates, and the rows without a user, may end in a tile that
  // isn't full.
  const AttentionKernel& kernel = kAttentionKernels[config.kernel];
  const int64_t rows = problem.B * problem.S;
  const int64_t users = std::max<int64_t>(std::min(problem.U, problem.B), 1);
  const int64_t most_tiles = (rows / kernel.tile_m + users + 1) * problem.H;
  // Candidates that are spread evenly make fewer.
  const int64_t rows_per_user = (rows + users - 1) / users;
  const int64_t tiles_per_user =
      std::max<int64_t>((rows_per_user + kernel.tile_m - 1) / kernel.tile_m, 1);
  const int64_t tiles = tiles_per_user * users * std::max<int64_t>(problem.H, 1);
  // Fewer tiles than half of the SMs: their keys are cut, into parts of at least min_part_tiles.
  const int64_t most_parts = problem.L / (kernel.tile_n * kernel.min_part_tiles);
  config.parts = static_cast<int>(std::clamp<int64_t>(
      device.sm_count / tiles, 1, std::clamp<int64_t>(most_parts, 1, kernel.max_parts)));
  // With parts, a cluster for each tile there is if candidates are spread evenly. If there are
  // more, these come after. More clusters, as many as there could be tiles, would mostly be empty,
  // wait for SMs, and keep the next kernel from starting.
  config.ctas = static_cast<int>(config.parts > 1 ? std::min(tiles, most_tiles) * config.parts
                                                  : std::min<int64_t>(most_tiles, device.sm_count));
#ifdef IKBO_ATTENTION_VARIANTS
  // Half of the SMs, so that the next kernel's CTAs wait on the other half.
  if (kernel.max_parts == 1 && 2 * tiles <= device.sm_count) {
    config.ctas = static_cast<int>(std::min(tiles, most_tiles));
  }
#endif
  // A guess only pays where it is mostly right.
  const bool guesses = !problem.lengths_differ && !problem.ordered && problem.U > 0;
  if (guesses) config.expected_tiles = static_cast<int>(tiles_per_user);
  config.rows_together = AttentionKernel::kConsumerRows;
  if (problem.ordered) {
    config.rows_together =
        static_cast<int>(std::gcd<int64_t>(problem.S, AttentionKernel::kConsumerRows));
  }
  // Clearing the counter is a launch of its own: not for a round or two of tiles.
  config.tickets = problem.lengths_differ && config.parts == 1 && tiles > 2 * config.ctas;
  if (kernel.shares_keys && config.parts == 1 && !problem.lengths_differ) {
    const int64_t blocks = (problem.L + kernel.tile_n - 1) / kernel.tile_n;
    const int64_t rounds = (tiles + config.ctas - 1) / config.ctas;
    const int64_t shared = (tiles * blocks + config.ctas - 1) / config.ctas;
    // What is kept and added up costs about as much as a block and a half.
    const bool pays = rounds * blocks - shared >= 2 && config.ctas == device.sm_count;
    if (pays && blocks < kMaxSharedBlocks) config.shared_blocks = static_cast<int>(blocks);
  }
  return config;
}

// "candidate_attention_sm90_128_128_128x128": heads, then tile
inline std::string name(const AttentionKernel& kernel) {
  return "candidate_attention_sm90_" + std::to_string(kernel.head_qk) + "_" +
         std::to_string(kernel.head_v) + "_" + std::to_string(AttentionKernel::kTileM) + "x" +
         std::to_string(kernel.tile_n);
}

// For explain: the config as JSON.
inline std::string to_json(const AttentionConfig& config) {
  const AttentionKernel& kernel = kAttentionKernels[config.kernel];
  return "{\"kernel\": \"" + name(kernel) + "\", \"stages\": " + std::to_string(kernel.stages) +
         ", \"shared_bytes\": " + std::to_string(kernel.shared_bytes()) +
         ", \"parts\": " + std::to_string(config.parts) +
         ", \"ctas\": " + std::to_string(config.ctas) +
         ", \"rows_together\": " + std::to_string(config.rows_together) +
         ", \"tickets\": " + (config.tickets ? "true" : "false") +
         ", \"expected_tiles\": " + std::to_string(config.expected_tiles) +
         (config.shared_blocks > 0 ? ", \"shared_blocks\": " + std::to_string(config.shared_blocks)
                                   : "") +
         "}";
}

}  // namespace ikbo
