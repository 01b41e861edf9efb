// How concat_linear is computed: which kernel the candidates' product and the users' product get. A
// pure function of problem and device, tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "config/gemm.h"

namespace ikbo {

// out[B, N] = act(x_cand[B, Kc] w_cand[N, Kc]^T + part[user of the row] + bias), with
// part[U, N] = x_user[U, Ku] w_user[N, Ku]^T unless it is at hand.
struct ConcatLinearProblem {
  int64_t B, U, N, Kc;
  int64_t Ku;  // 0 where the part is at hand
};

// The kernels find a row of the part by its number of 16 bytes, in 32 bits.
inline constexpr int64_t kMaxPartElements = int64_t{8} * 0xffffffff;

// Of the kernels of kGemmKernels that exist with the joining epilogue (kJoinKernels), those that
// join parts. Pairs of CTAs save L2 traffic that tiles of 128 x 256 don't need to save.
inline constexpr int kConcatKernels[] = {2, 5, 6};
inline constexpr int kJoinKernels[] = {2, 4, 5, 6};

// The product of few rows: a CTA takes 16 columns, so that many SMs share the reading of the
// weight, and its warps share K. Its operands go straight to registers: no ring to set up, which at
// these sizes is most of a GEMM's time.
struct FewRowsKernel {
  static constexpr int kColumns = 16;
  static constexpr int kRows = 32;
  static constexpr int kWarps = 16;
  static constexpr int kThreads = 32 * kWarps;

  static constexpr int64_t ctas(const GemmProblem& problem) {
    return gemm_model::ceil_div(problem.N, kColumns) * gemm_model::ceil_div(problem.M, kRows);
  }
};

enum class UserProduct {
  kNone,
  kFewRows,
  kGemm,  // one of kConcatKernels with nothing to join
};

struct ConcatLinearConfig {
  GemmConfig candidates;
  UserProduct user_product;
  GemmConfig users;    // of kGemm
  int packed_weights;  // weights that a first launch copies to rows the copy engine reads
  bool waits_for_users() const { return user_product != UserProduct::kNone; }
  int launches() const { return 1 + waits_for_users() + (packed_weights > 0); }
};

namespace concat_linear_model {

constexpr GemmProblem candidates_product(const ConcatLinearProblem& p) {
  return {p.B, p.N, p.Kc, 1};
}
constexpr GemmProblem users_product(const ConcatLinearProblem& p) { return {p.U, p.N, p.Ku, 1}; }

// Clocks of the SM with the most CTAs: its operands' way from L2, which one CTA at a time leaves
// idle at its start and end.
constexpr double few_rows_clocks(const GemmProblem& problem, const DeviceLimits& device) {
  constexpr double kIdleClocks = 1500;
  const int64_t ctas = FewRowsKernel::ctas(problem);
  const int64_t rows = FewRowsKernel::kColumns + std::min<int64_t>(problem.M, FewRowsKernel::kRows);
  const double bytes =
      static_cast<double>(rows) * static_cast<double>(problem.K) * GemmKernel::kElementBytes;
  const auto running = static_cast<double>(std::min<int64_t>(ctas, device.sm_count));
  const double rate = std::min(gemm_model::kIngestBytesPerClock,
                               gemm_model::kL2BytesPerClock * device.sm_count / running);
  const auto waves = static_cast<double>(gemm_model::ceil_div(ctas, device.sm_count));
  return waves * bytes / rate + (waves - 1) * kIdleClocks;
}

}  // namespace concat_linear_model

// Why the kernels don't take the problem, or nullptr. Sizes aren't negative.
constexpr const char* concat_linear_decline_reason(const ConcatLinearProblem& problem,
                                                   const DeviceLimits& device) {
  using namespace concat_linear_model;
  if (problem.N % 8 != 0) return "N is no multiple of 8";
  if (problem.Kc == 0) return "candidates without features";
  for (const GemmProblem& product : {candidates_product(problem), users_product(problem)}) {
    if (const char* reason = gemm_decline_reason(product, device)) return reason;
    if (!gemm_model::any_is_usable(kConcatKernels, product, device))
      return "more than 2^30 output tiles";
  }
  if (problem.U * problem.N >= kMaxPartElements) return "a product of the users of 64 GiB or more";
  return nullptr;
}

// For a problem with an output (B and N at least 1) and no concat_linear_decline_reason.
constexpr ConcatLinearConfig concat_linear_config(const ConcatLinearProblem& problem,
                                                  const DeviceLimits& device) {
  using namespace concat_linear_model;
  const GemmProblem candidates = candidates_product(problem), users = users_product(problem);
  ConcatLinearConfig config{};
  config.candidates = gemm_config_of(gemm_model::best_of(kConcatKernels, candidates, device).kernel,
                                     candidates, device);
  config.user_product = UserProduct::kNone;
  if (problem.U > 0 && problem.Ku > 0) {
    const gemm_model::Choice choice = gemm_model::best_of(kConcatKernels, users, device);
    const bool few = few_rows_clocks(users, device) < choice.clocks;
    config.user_product = few ? UserProduct::kFewRows : UserProduct::kGemm;
    if (!few) config.users = gemm_config_of(choice.kernel, users, device);
  }
  return config;
}

// For explain: the config as JSON.
inline std::string to_json(const ConcatLinearConfig& config) {
  std::string users = "null";
  if (config.user_product == UserProduct::kFewRows) users = "{\"kernel\": \"few_rows_sm90\"}";
  if (config.user_product == UserProduct::kGemm) users = to_json(config.users);
  return "{\"kernel\": \"concat_linear_sm90\", \"launches\": " + std::to_string(config.launches()) +
         ", \"packed_weights\": " + std::to_string(config.packed_weights) +
         ", \"users\": " + users + ", \"candidates\": " + to_json(config.candidates) + "}";
}

}  // namespace ikbo
