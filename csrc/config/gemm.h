// Which kernel, grid and tile order D[M,N] = A[M,K] B[N,K]^T gets, in 16-bit types with fp32 sums:
// a pure function of problem and device, tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <string>

#include "config/device_limits.h"
#include "config/tile_order.h"

namespace ikbo {

struct GemmProblem {
  int64_t M, N, K, batch;
};

enum class GemmSchedule {
  kCooperative,  // the consumers share a tile, each takes half of its rows
  kPingPong,     // each consumer owns a tile; one's epilogue runs under the other's products
};

// A compiled kernel: persistent, one CTA an SM, a producer and two consumer warp groups.
struct GemmKernel {
  static constexpr int kTileK = 64;  // 128 bytes: the swizzle span
  static constexpr int kElementBytes = 2;
  static constexpr int kConsumers = 2;
  static constexpr int kWarpGroupThreads = 128;
  static constexpr int kThreads = (1 + kConsumers) * kWarpGroupThreads;
  // setmaxnreg moves registers from the producer to the consumers.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kRegistersPerSm = 65536;
  static constexpr int kEntryRegisters = kRegistersPerSm / kThreads / 8 * 8;
  // Beside a wgmma's accumulators: ptxas takes n <= 200 (100 accumulators) where it has 128
  // registers.
  static constexpr int kOtherRegisters = 28;
  // Beside all accumulators of a consumer: with 192 of them the epilogues take 37.
  static constexpr int kOtherConsumerRegisters = 40;
  // 64 x 64 boxes of results a consumer: one is filled while TMA stores the other.
  static constexpr int kStagingBuffers = 2;
  static constexpr int kBufferBytes = kConsumers * 64 * 64 * kElementBytes;  // of both consumers
  static constexpr int kBarrierBytes = 2048;    // and what an epilogue keeps: biases
  static constexpr int kAlignmentBytes = 1024;  // 128-byte swizzle repeats every 1024

  int tile_m;
  int tile_n;
  int stages;
  int cluster_m;  // CTAs that take neighbouring M tiles and share B by multicast
  GemmSchedule schedule;

  constexpr int rows_per_consumer() const {
    return schedule == GemmSchedule::kCooperative ? tile_m / kConsumers : tile_m;
  }
  // fp32 accumulators a consumer thread holds; one wgmma holds 64 rows of them.
  constexpr int accumulators() const { return rows_per_consumer() * tile_n / kWarpGroupThreads; }
  constexpr int accumulators_of_wgmma() const { return 64 * tile_n / kWarpGroupThreads; }
  constexpr int stage_bytes() const { return (tile_m + tile_n) * kTileK * kElementBytes; }
  constexpr int shared_bytes() const {
    return stages * stage_bytes() + kStagingBuffers * kBufferBytes + kBarrierBytes +
           kAlignmentBytes;
  }
  // The stages that are left by an epilogue with more buffers than two.
  constexpr int stages_beside(int buffers) const {
    const int more_bytes = (buffers - kStagingBuffers) * kBufferBytes;
    return stages - (more_bytes + stage_bytes() - 1) / stage_bytes();
  }
};

// Where two are estimated alike, the earlier one is taken.
inline constexpr GemmKernel kGemmKernels[] = {
    {128, 256, 4, 2, GemmSchedule::kCooperative},  // large problems: fewest bytes an FMA
    {256, 128, 4, 2, GemmSchedule::kCooperative},  // where N fills 128 columns but not 256
    {128, 256, 4, 1, GemmSchedule::kCooperative},  // single waves, odd numbers of M tiles
    {256, 128, 4, 1, GemmSchedule::kCooperative},
    {128, 128, 6, 2, GemmSchedule::kPingPong},  // epilogues that are much of the work
    {128, 128, 6, 1, GemmSchedule::kPingPong},  // less than a wave of the above
    {64, 128, 8, 1, GemmSchedule::kPingPong},   // small problems: the most CTAs
};
inline constexpr int kGemmKernelCount = static_cast<int>(std::size(kGemmKernels));
// What the plain epilogue runs on.
inline constexpr int kPlainKernels[] = {0, 1, 2, 3, 5, 6};

constexpr bool gemm_kernel_is_possible(const GemmKernel& kernel) {
  constexpr int kMaxSharedBytes = 227 * 1024;
  // Below n = 128, reading the operands of wgmma takes all of shared memory's bandwidth.
  return kernel.rows_per_consumer() % 64 == 0 && kernel.tile_n >= 128 && kernel.tile_n <= 256 &&
         kernel.tile_n % 64 == 0 && (kernel.cluster_m == 1 || kernel.cluster_m == 2) &&
         // With multicast, each CTA of a pair loads half of B's rows, in whole swizzle atoms.
         kernel.tile_n / kernel.cluster_m % 8 == 0 && kernel.stages >= 4 &&
         kernel.accumulators() + GemmKernel::kOtherConsumerRegisters <=
             GemmKernel::kConsumerRegisters &&
         kernel.accumulators_of_wgmma() + GemmKernel::kOtherRegisters <=
             GemmKernel::kEntryRegisters &&
         kernel.shared_bytes() <= kMaxSharedBytes;
}
static_assert(std::all_of(std::begin(kGemmKernels), std::end(kGemmKernels),
                          gemm_kernel_is_possible));
static_assert(GemmKernel::kWarpGroupThreads *
                  (GemmKernel::kProducerRegisters +
                   GemmKernel::kConsumers * GemmKernel::kConsumerRegisters) <=
              GemmKernel::kRegistersPerSm);

struct GemmConfig {
  int kernel;  // index in kGemmKernels
  int grid;    // CTAs, a multiple of the cluster size
  int32_t m_tiles;
  int32_t n_tiles;
  int32_t k_steps;  // 0 where K is 0: nothing is loaded, and the result is the epilogue of zeros
  int32_t waves;    // tiles of the busiest CTA
  RasterOrder raster;
  TileOrder order;
  double clocks;       // estimated for the busiest SM, without the start and without DRAM's limit
  double utilisation;  // estimated share of all SMs' tensor peak that is useful work
};

namespace gemm_model {

// An H100's figures; a power-capped card changes its clock, which leaves counts of clocks alone.
inline constexpr double kFlopsPerClock = 4096;  // dense 16-bit, of an SM
// Into each SM while all of them load: what makes 8192x768x3072 by 128 x 128 tiles take 0.77 of the
// time by 128 x 256 ones, as an H200 does.
inline constexpr double kL2BytesPerClock = 60;
inline constexpr double kIngestBytesPerClock = 64;  // into one SM at most; out of it likewise
// An epilogue that rounds and stores, for each sum of its tile.
inline constexpr double kPlainEpilogueClocks = GemmKernel::kElementBytes / kIngestBytesPerClock;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Clusters, or more than kMaxTiles where the product would be larger than that.
constexpr int64_t clusters(const GemmKernel& kernel, const GemmProblem& problem) {
  int64_t product = 1;
  for (const int64_t factor : {ceil_div(problem.M, int64_t{kernel.tile_m} * kernel.cluster_m),
                               ceil_div(problem.N, kernel.tile_n), problem.batch}) {
    if (factor != 0 && product > kMaxTiles / factor) return kMaxTiles + 1;
    product *= factor;
  }
  return product;
}

constexpr bool is_usable(const GemmKernel& kernel, const GemmProblem& problem,
                         const DeviceLimits& device) {
  return kernel.shared_bytes() <= device.max_shared_bytes_per_cta &&
         kernel.cluster_m <= device.sm_count &&
         clusters(kernel, problem) <= kMaxTiles / kernel.cluster_m;
}

constexpr int64_t resident_clusters(const GemmKernel& kernel, const GemmProblem& problem,
                                    const DeviceLimits& device) {
  return std::min<int64_t>(clusters(kernel, problem), device.sm_count / kernel.cluster_m);
}

// Clocks of one K step of a tile: its products, or its operands' way from L2.
constexpr double step_clocks(const GemmKernel& kernel, int64_t grid, const DeviceLimits& device) {
  const double products = 2.0 * kernel.tile_m * kernel.tile_n * GemmKernel::kTileK / kFlopsPerClock;
  // Of a row that a pair shares, either CTA loads half; idle SMs leave their share of L2 to others.
  const double bytes = (kernel.tile_m + static_cast<double>(kernel.tile_n) / kernel.cluster_m) *
                       GemmKernel::kTileK * GemmKernel::kElementBytes;
  const double rate = std::min(kIngestBytesPerClock,
                               kL2BytesPerClock * device.sm_count / static_cast<double>(grid));
  return std::max(products, bytes / rate);
}

// Clocks of the SM with the most tiles. The epilogue's are those of one sum.
constexpr double clocks(const GemmKernel& kernel, const GemmProblem& problem,
                        const DeviceLimits& device, double epilogue_clocks = kPlainEpilogueClocks) {
  const int64_t resident = resident_clusters(kernel, problem, device);
  const auto waves = static_cast<double>(ceil_div(clusters(kernel, problem), resident));
  const double products = static_cast<double>(ceil_div(problem.K, GemmKernel::kTileK)) *
                          step_clocks(kernel, resident * kernel.cluster_m, device);
  const double epilogue = static_cast<double>(kernel.tile_m) * kernel.tile_n * epilogue_clocks;
  if (kernel.schedule == GemmSchedule::kCooperative) return waves * (products + epilogue);
  // Two tiles are under way: each takes products + epilogue, and only the products exclude another.
  return (waves - 1) * std::max(products, (products + epilogue) / 2) + products + epilogue;
}

// Some of kGemmKernels: those that exist with an epilogue.
template <size_t kCount>
constexpr bool any_is_usable(const int (&kernels)[kCount], const GemmProblem& problem,
                             const DeviceLimits& device) {
  return std::any_of(std::begin(kernels), std::end(kernels),
                     [&](int kernel) { return is_usable(kGemmKernels[kernel], problem, device); });
}

struct Choice {
  int kernel;  // index in kGemmKernels; -1 where none is usable
  double clocks;
};

// The one of them with the least estimated clocks.
template <size_t kCount>
constexpr Choice best_of(const int (&kernels)[kCount], const GemmProblem& problem,
                         const DeviceLimits& device,
                         double epilogue_clocks = kPlainEpilogueClocks) {
  Choice best{-1, std::numeric_limits<double>::infinity()};
  for (const int kernel : kernels) {
    if (!is_usable(kGemmKernels[kernel], problem, device)) continue;
    const double estimate = clocks(kGemmKernels[kernel], problem, device, epilogue_clocks);
    if (estimate < best.clocks) best = {kernel, estimate};
  }
  return best;
}

}  // namespace gemm_model

// Why no kernel takes the problem, or nullptr. Sizes aren't negative.
constexpr const char* gemm_decline_reason(const GemmProblem& problem, const DeviceLimits& device) {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
  if (std::max({problem.M, problem.N, problem.K, problem.batch}) > kMaxSize) {
    return "a size of 2^31 or more, which TMA coordinates can't hold";
  }
  const bool has_shared_memory =
      std::any_of(std::begin(kGemmKernels), std::end(kGemmKernels), [&](const GemmKernel& kernel) {
        return kernel.shared_bytes() <= device.max_shared_bytes_per_cta;
      });
  if (!has_shared_memory || device.sm_count < 1) {
    return "a device without the shared memory or the SMs of any kernel";
  }
  if (!gemm_model::any_is_usable(kPlainKernels, problem, device)) {
    return "more than 2^30 output tiles";
  }
  return nullptr;
}

// The config of one kernel that is usable for the problem, which has an output.
constexpr GemmConfig gemm_config_of(int index, const GemmProblem& problem,
                                    const DeviceLimits& device,
                                    double epilogue_clocks = gemm_model::kPlainEpilogueClocks) {
  const GemmKernel& kernel = kGemmKernels[index];
  const int64_t resident = gemm_model::resident_clusters(kernel, problem, device);
  const TileGrid tiles{
      static_cast<int32_t>(gemm_model::ceil_div(problem.M, kernel.tile_m)),
      static_cast<int32_t>(gemm_model::ceil_div(problem.N, kernel.tile_n)),
      static_cast<int32_t>(problem.batch),
      kernel.cluster_m,
  };
  const int64_t row_bytes = problem.K * GemmKernel::kElementBytes;

  GemmConfig config{};
  config.kernel = index;
  config.grid = static_cast<int>(resident) * kernel.cluster_m;
  config.m_tiles = tiles.m_tiles;
  config.n_tiles = tiles.n_tiles;
  config.k_steps = static_cast<int32_t>(gemm_model::ceil_div(problem.K, GemmKernel::kTileK));
  config.raster = choose_raster_order({
      tiles.m_clusters(),
      tiles.n_tiles,
      kernel.cluster_m * kernel.tile_m * row_bytes,
      kernel.tile_n * row_bytes,
      resident,
      device.l2_bytes,
  });
  config.order = TileOrder(tiles, config.raster);
  config.waves = static_cast<int32_t>(gemm_model::ceil_div(config.order.tiles(), config.grid));
  config.clocks = gemm_model::clocks(kernel, problem, device, epilogue_clocks);
  config.utilisation = 2.0 * static_cast<double>(problem.M) * static_cast<double>(problem.N) *
                       static_cast<double>(problem.K) * static_cast<double>(problem.batch) /
                       (gemm_model::kFlopsPerClock * config.clocks * device.sm_count);
  return config;
}

// The config with the least estimated clocks; nothing where there is no output (M, N or batch is 0)
// or where gemm_decline_reason has one.
constexpr std::optional<GemmConfig> gemm_config(const GemmProblem& problem,
                                                const DeviceLimits& device) {
  const bool has_output = problem.M > 0 && problem.N > 0 && problem.batch > 0;
  if (!has_output || gemm_decline_reason(problem, device) != nullptr) return std::nullopt;
  return gemm_config_of(gemm_model::best_of(kPlainKernels, problem, device).kernel, problem,
                        device);
}

inline const char* name(GemmSchedule schedule) {
  return schedule == GemmSchedule::kCooperative ? "cooperative" : "ping_pong";
}

// "gemm_sm90_128x256x64_cooperative_cluster2"
inline std::string name(const GemmKernel& kernel) {
  return "gemm_sm90_" + std::to_string(kernel.tile_m) + "x" + std::to_string(kernel.tile_n) + "x" +
         std::to_string(GemmKernel::kTileK) + "_" + name(kernel.schedule) + "_cluster" +
         std::to_string(kernel.cluster_m);
}

// For explain: the config as JSON.
inline std::string to_json(const GemmConfig& config) {
  const GemmKernel& kernel = kGemmKernels[config.kernel];
  return "{\"kernel\": \"" + name(kernel) + "\", \"stages\": " + std::to_string(kernel.stages) +
         ", \"shared_bytes\": " + std::to_string(kernel.shared_bytes()) +
         ", \"grid\": " + std::to_string(config.grid) +
         ", \"m_tiles\": " + std::to_string(config.m_tiles) +
         ", \"n_tiles\": " + std::to_string(config.n_tiles) +
         ", \"k_steps\": " + std::to_string(config.k_steps) +
         ", \"waves\": " + std::to_string(config.waves) + ", \"groups_along\": \"" +
         (config.raster.groups_along_n ? "N" : "M") +
         "\", \"group\": " + std::to_string(config.raster.group) +
         ", \"estimated_clocks\": " + std::to_string(static_cast<int64_t>(config.clocks)) +
         ", \"estimated_utilisation\": " + std::to_string(config.utilisation) + "}";
}

}  // namespace ikbo
