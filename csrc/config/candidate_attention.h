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

// `consumers` x 64 query rows of one user and head by tile_n keys, one CTA an SM.
struct AttentionKernel {
  static constexpr int kConsumerRows = 64;  // of one wgmma
  static constexpr int kElementBytes = 2;
  static constexpr int kWarpGroupThreads = 128;
  static constexpr int kRegistersPerSm = 65536;
  static constexpr int kSmallBytes = 1024;      // barriers, tile descriptors
  static constexpr int kAlignmentBytes = 1024;  // the 128-byte swizzle repeats every 1024

  int head_qk;  // head size of queries and keys; smaller ones are filled with zeros
  int head_v;
  int tile_n;
  int q_slots;  // of each consumer: with two, the next tile's q is there before this one is done
                // with
  int stages;   // of K and of V
  int consumers = 2;
  // The second product is waited for before the exponentials: then these, sums and rounding are one
  // block of instructions, which ptxas interleaves.
  bool waits_early = false;
  // Tiles that don't fill a round are shared out by blocks of keys (config/shared_blocks.h).
  bool shares_keys = false;

  constexpr int tile_m() const { return consumers * kConsumerRows; }
  constexpr int q_bytes() const { return kConsumerRows * head_qk * kElementBytes; }  // of a slot
  constexpr int k_bytes() const { return tile_n * head_qk * kElementBytes; }         // of a stage
  constexpr int v_bytes() const { return tile_n * head_v * kElementBytes; }
  constexpr int shared_bytes() const {
    return consumers * q_slots * q_bytes() + stages * (k_bytes() + v_bytes()) + kSmallBytes +
           kAlignmentBytes;
  }
  constexpr int threads() const { return (consumers + 1) * kWarpGroupThreads; }
  // Of a thread.
  constexpr int consumer_registers() const { return consumers == 2 ? 232 : 160; }
  constexpr int other_registers() const { return consumers == 2 ? 40 : 32; }
  // fp32 scores and outputs, and 16-bit weights, that a consumer thread holds.
  constexpr int scores() const { return tile_n / 2; }
  constexpr int outputs() const { return head_v / 2; }
  constexpr int weights() const { return tile_n / 4; }
};

enum AttentionKernelIndex {
  k64,
  k64Tall,
  k128,
  k128Jagged,
  k128SharesKeys,
  k192,
  k256,
  kAttentionKernelCount,
};
inline constexpr AttentionKernel kAttentionKernels[] = {
    {64, 64, 128, 2, 4},
    // The softmax of heads of 64 takes longer than their products: of two consumers', one runs
    // under the products of the third.
    {64, 64, 128, 2, 4, 3, /*waits_early=*/true},
    {128, 128, 128, 2, 2},
    // Of the last block of keys half is masked on average: smaller blocks. They run as fast a key.
    {128, 128, 96, 2, 3},
    // Sharing makes every step 2 to 3 % slower, even where nothing is shared.
    {128, 128, 128, 2, 2, 2, false, /*shares_keys=*/true},
    // Steps of larger heads are long enough to load q in. With fewer keys, products would be bound
    // by reads of q from shared memory.
    {192, 128, 128, 1, 2},
    {256, 256, 80, 1, 2},
};
static_assert(std::size(kAttentionKernels) == kAttentionKernelCount);

constexpr bool attention_kernel_is_possible(const AttentionKernel& kernel) {
  constexpr int kMaxSharedBytes = 227 * 1024;
  // Beside them addresses, running maxima and sums.
  const int kept_free = kernel.consumers == 2 ? 40 : 32;
  return kernel.head_qk % 64 == 0 && kernel.head_v % 64 == 0 && kernel.tile_n % 16 == 0 &&
         kernel.head_v <= kernel.head_qk &&
         kernel.scores() + kernel.outputs() + kernel.weights() + kept_free <=
             kernel.consumer_registers() &&
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
};

struct AttentionConfig {
  static constexpr int kMaxParts = 64;

  int kernel;          // index in kAttentionKernels
  int parts;           // into which each tile's keys are cut; a second kernel adds them up
  int ctas;            // persistent, at most one an SM
  int rows_together;   // of a consumer's 64 query rows, how many lie side by side for sure
  bool tickets;        // a CTA that is free takes the next tile, of 32 users those of the longest
                       // histories first; else every ctas-th from its own on
  int expected_tiles;  // of a user and head, where a CTA's first tile can be guessed; 0: it can't
  int shared_blocks;   // of a tile, where those that don't fill a round are shared out; or 0
  int most_tiles;      // where keys are cut, tiles that there can be; else 0
};

// Why no kernel takes the problem, or nullptr. Sizes aren't negative.
constexpr const char* attention_decline_reason(const AttentionProblem& problem,
                                               const DeviceLimits& device) {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
  constexpr int64_t kLeastTileM = kAttentionKernels[k64].tile_m();
  constexpr int64_t kMostTileM = kAttentionKernels[k64Tall].tile_m();
  if (problem.D % 8 != 0 || problem.Dv % 8 != 0 || problem.Dv == 0) {
    return "head sizes that are not multiples of 8, which TMA needs";
  }
  // Nor may a run's end, rounded up to tiles, leave int32.
  if (problem.S != 0 && problem.B > (kMaxSize - kMostTileM) / problem.S) {
    return "2^31 query rows or more, which TMA coordinates can't hold";
  }
  // Nor the number of tiles, of all heads, one grid further on.
  const int64_t tiles = problem.B * problem.S / kLeastTileM + problem.U + 1;
  if (problem.H > kMaxSize / 16 / tiles) return "2^27 tiles or more";
  const AttentionKernel& largest = kAttentionKernels[k256];
  if (problem.D > largest.head_qk || problem.Dv > largest.head_v) return "heads larger than 256";
  if (largest.shared_bytes() > device.max_shared_bytes_per_cta) {
    return "a device without the shared memory of the kernels";
  }
  return nullptr;
}

// How many tiles there are where candidates are spread evenly, and how many there can be.
struct AttentionTiles {
  int64_t of_user;  // and head, where they are spread evenly
  int64_t even, most;
};
constexpr AttentionTiles attention_tiles(const AttentionProblem& problem, int64_t tile_m) {
  const int64_t rows = problem.B * problem.S;
  const int64_t users = std::max<int64_t>(std::min(problem.U, problem.B), 1);
  const int64_t of_user = std::max<int64_t>(((rows + users - 1) / users + tile_m - 1) / tile_m, 1);
  // The run of each user that has candidates, and the rows without a user, may end in a tile that
  // isn't full.
  return {of_user, of_user * users * std::max<int64_t>(problem.H, 1),
          (rows / tile_m + users + 1) * problem.H};
}

// The smallest heads that hold the problem's. Tall tiles have steps 1.18 times as long, for 1.5
// times the rows: not where they are mostly empty.
constexpr AttentionKernelIndex attention_kernel_for_heads(const AttentionProblem& problem,
                                                          const DeviceLimits& device) {
  constexpr AttentionKernelIndex kBySize[] = {k64, k128, k192, k256};
  int size = 0;
  while (kAttentionKernels[kBySize[size]].head_qk < problem.D ||
         kAttentionKernels[kBySize[size]].head_v < problem.Dv) {
    ++size;
  }
  if (kBySize[size] != k64) return kBySize[size];
  const auto rounds = [&](AttentionKernelIndex kernel) {
    const int64_t tiles = attention_tiles(problem, kAttentionKernels[kernel].tile_m()).even;
    return (tiles + device.sm_count - 1) / device.sm_count;
  };
  return 6 * rounds(k64Tall) < 5 * rounds(k64) ? k64Tall : k64;
}

// Into how many parts each tile's keys are cut: by what the parts take, in eighths of a step with a
// block of keys, which is about a microsecond. Adding them up costs three, and more with more of
// them. On half of the SMs a kernel leaves the other half to what follows it, which then is there
// when this one ends.
constexpr int attention_parts(int64_t tiles, int64_t blocks, int sm_count) {
  int best = 1;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int parts = 1; parts <= AttentionConfig::kMaxParts; ++parts) {
    if (parts > 1 && (parts > blocks || parts * tiles > sm_count)) break;
    const int64_t takes = 8 * ((blocks + parts - 1) / parts) + (parts > 1 ? 24 + parts : 0) +
                          (2 * parts * tiles > sm_count ? 16 : 0);
    if (takes < least) best = parts;
    least = std::min(least, takes);
  }
  return best;
}

// For a problem without a decline reason.
constexpr AttentionConfig attention_config(const AttentionProblem& problem,
                                           const DeviceLimits& device) {
  constexpr int kMaxSharedBlocks = 1 << 14;  // times two rounds of tiles it stays in int32
  AttentionConfig config{};
  config.kernel = attention_kernel_for_heads(problem, device);
  const AttentionKernel& kernel = kAttentionKernels[config.kernel];
  const AttentionTiles tiles = attention_tiles(problem, kernel.tile_m());
  const int64_t blocks = (problem.L + kernel.tile_n - 1) / kernel.tile_n;
  config.parts = attention_parts(tiles.even, blocks, device.sm_count);
  if (config.parts > 1) config.most_tiles = static_cast<int>(tiles.most);
  // With parts or on half of the SMs, a CTA for each there is if candidates are spread evenly. If
  // there are more, these come after. More CTAs, as many as there could be tiles, would mostly have
  // nothing to do and keep what follows from starting.
  const bool few = 2 * tiles.even <= device.sm_count;
  config.ctas =
      static_cast<int>(config.parts > 1 || few ? std::min(tiles.even, tiles.most) * config.parts
                                               : std::min<int64_t>(tiles.most, device.sm_count));
  config.rows_together = AttentionKernel::kConsumerRows;
  if (problem.ordered) {
    config.rows_together =
        static_cast<int>(std::gcd<int64_t>(problem.S, AttentionKernel::kConsumerRows));
  }
  // Clearing the counter is a launch of its own: not for a round or two of tiles.
  config.tickets = problem.lengths_differ && config.parts == 1 && tiles.even > 2 * config.ctas;
  // A guess only pays where it is mostly right: that each user has as many candidates.
  const bool guesses =
      !problem.lengths_differ && !problem.ordered && problem.U > 0 && problem.B % problem.U == 0;
  if (guesses) config.expected_tiles = static_cast<int>(tiles.of_user);
  if (config.kernel != k128) return config;
  if (config.tickets) config.kernel = k128Jagged;
  if (config.parts == 1 && !problem.lengths_differ && config.ctas == device.sm_count) {
    const int64_t unshared = (tiles.even + config.ctas - 1) / config.ctas * blocks;
    const int64_t shared = (tiles.even * blocks + config.ctas - 1) / config.ctas;
    // What is kept and added up costs about two blocks, and every step is slower.
    const bool pays = unshared - shared > 2 + unshared / 64;
    if (pays && blocks < kMaxSharedBlocks) {
      config.kernel = k128SharesKeys;
      config.shared_blocks = static_cast<int>(blocks);
    }
  }
  return config;
}

// "candidate_attention_sm90_128_128_128x128": heads, then tile
inline std::string name(const AttentionKernel& kernel) {
  return "candidate_attention_sm90_" + std::to_string(kernel.head_qk) + "_" +
         std::to_string(kernel.head_v) + "_" + std::to_string(kernel.tile_m()) + "x" +
         std::to_string(kernel.tile_n) + (kernel.shares_keys ? "_shared" : "");
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
         ", \"shared_blocks\": " + std::to_string(config.shared_blocks) + "}";
}

}  // namespace ikbo
