// How gated_linear, linear_act and gated_mlp are computed: which kernel each product gets. A pure
// function of problem and device, tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "config/concat_linear.h"
#include "config/gemm.h"
#include "config/weight_stream.h"

namespace ikbo {

// M rows of K features into N. linear_act: out[M, N] = act(x[M, K] w[N, K]^T + b). gated_linear:
// out[M, N] = act(x w_gate[N, K]^T + b_gate) * (x w_up[N, K]^T + b_up).
struct LinearProblem {
  int64_t M, N, K;
};

// The kernels of kGemmKernels that exist with the gating epilogue. Gate and up share a tile, so it
// covers half of tile_n in columns of the output.
inline constexpr int kGatedKernels[] = {2, 4, 5, 6};

// Likewise with the epilogue of gated_mlp's backward. It hides under products only where consumers
// take turns, and its loads and stores leave L2 little for operands: so pairs of CTAs share them.
inline constexpr int kGatedGradKernels[] = {4};
// Likewise for the gradient of the input, a sum of two products.
inline constexpr int kInputGradKernels[] = {2, 4, 5, 6};

// Few tokens go to the kernel that streams the weights, all others to the GEMM.
struct ProductConfig {
  bool streams;
  WeightStreamConfig stream;  // where it streams
  GemmConfig gemm;            // elsewhere; of two weights it counts the columns of both
};

struct LinearActConfig {
  ProductConfig product;
  int packed_weights;  // weights that a first launch copies to rows the copy engine reads
  int launches() const { return 1 + (packed_weights > 0); }
};

struct GatedLinearConfig {
  ProductConfig product;
  int packed_weights;
  int launches() const { return 1 + (packed_weights > 0); }
};

// gated_linear into a hidden tensor, then linear_act without activation, which starts while the
// first kernel ends.
struct GatedMlpConfig {
  ProductConfig hidden;
  ProductConfig down;
  int packed_weights;
  int launches() const { return 2 + (packed_weights > 0); }
};

namespace gated_model {

// Biases, gelu, product, rounding: about 25 instructions for two sums, at 128 lanes a clock.
inline constexpr double kEpilogueClocks = 0.1;
// Two loads and three stores of 2 bytes, the activation's derivative: about 40 instructions a sum.
inline constexpr double kGradEpilogueClocks = 0.3;

constexpr GemmProblem linear_product(const LinearProblem& p) { return {p.M, p.N, p.K, 1}; }
constexpr GemmProblem gated_product(const LinearProblem& p) { return {p.M, 2 * p.N, p.K, 1}; }
constexpr WeightStreamProblem stream_problem(const LinearProblem& p, int weights) {
  return {p.M, p.N, p.K, weights};
}

constexpr bool is_few_tokens(const LinearProblem& p) {
  return p.M <= WeightStreamKernel::kMaxTokens;
}

template <size_t kCount>
constexpr const char* decline_reason(const LinearProblem& problem, int weights,
                                     const GemmProblem& product, const int (&kernels)[kCount],
                                     const DeviceLimits& device) {
  if (problem.N % 8 != 0) return "out features that are no multiple of 8";
  if (problem.K == 0) return "inputs without features";
  if (is_few_tokens(problem)) {
    return weight_stream_decline_reason(stream_problem(problem, weights), device);
  }
  if (const char* reason = gemm_decline_reason(product, device)) return reason;
  if (!gemm_model::any_is_usable(kernels, product, device)) return "more than 2^30 output tiles";
  return nullptr;
}

template <size_t kCount>
constexpr ProductConfig product_config(const LinearProblem& problem, int weights,
                                       const GemmProblem& product, const int (&kernels)[kCount],
                                       double epilogue_clocks, const DeviceLimits& device) {
  ProductConfig config{};
  config.streams = is_few_tokens(problem);
  if (config.streams) {
    config.stream = weight_stream_config(stream_problem(problem, weights), device);
  } else {
    const int kernel = gemm_model::best_of(kernels, product, device, epilogue_clocks).kernel;
    config.gemm = gemm_config_of(kernel, product, device, epilogue_clocks);
  }
  return config;
}

}  // namespace gated_model

// Why the kernels don't take the problem, or nullptr. Sizes aren't negative.
constexpr const char* linear_act_decline_reason(const LinearProblem& problem,
                                                const DeviceLimits& device) {
  return gated_model::decline_reason(problem, 1, gated_model::linear_product(problem), kJoinKernels,
                                     device);
}
constexpr const char* gated_linear_decline_reason(const LinearProblem& problem,
                                                  const DeviceLimits& device) {
  return gated_model::decline_reason(problem, 2, gated_model::gated_product(problem), kGatedKernels,
                                     device);
}

// For problems with an output (M and N at least 1) and no decline reason.
constexpr ProductConfig linear_product_config(const LinearProblem& problem,
                                              const DeviceLimits& device) {
  return gated_model::product_config(problem, 1, gated_model::linear_product(problem), kJoinKernels,
                                     gemm_model::kPlainEpilogueClocks, device);
}
constexpr ProductConfig gated_product_config(const LinearProblem& problem,
                                             const DeviceLimits& device) {
  return gated_model::product_config(problem, 2, gated_model::gated_product(problem), kGatedKernels,
                                     gated_model::kEpilogueClocks, device);
}

constexpr LinearActConfig linear_act_config(const LinearProblem& problem,
                                            const DeviceLimits& device) {
  return {linear_product_config(problem, device), 0};
}
constexpr GatedLinearConfig gated_linear_config(const LinearProblem& problem,
                                                const DeviceLimits& device) {
  return {gated_product_config(problem, device), 0};
}
// `out_features` are those of the whole; the problem's N are the hidden ones.
constexpr GatedMlpConfig gated_mlp_config(const LinearProblem& problem, int64_t out_features,
                                          const DeviceLimits& device) {
  return {gated_product_config(problem, device),
          linear_product_config({problem.M, out_features, problem.N}, device), 0};
}
constexpr const char* gated_mlp_decline_reason(const LinearProblem& problem, int64_t out_features,
                                               const DeviceLimits& device) {
  if (const char* reason = gated_linear_decline_reason(problem, device)) return reason;
  if (problem.N == 0 || out_features == 0) return "no hidden features, or no out features";
  return linear_act_decline_reason({problem.M, out_features, problem.N}, device);
}

// The backward of both gated ops, beside the library's products: the gradients at the two
// pre-activations, element by element or (gated_mlp) in the epilogue of a GEMM with w_down, and the
// input's gradient.
struct GatedGradConfig {
  bool has_hidden;     // there is a w_down
  GemmConfig hidden;   // with it: its product's
  bool has_input;      // the input's gradient is wanted, and a kernel takes it
  GemmConfig input;    // with it: of one of its two terms
  int packed_weights;  // weights that a launch copies to rows the copy engine reads
};

namespace gated_model {
constexpr GemmProblem hidden_grad_product(const LinearProblem& p, int64_t out_features) {
  return {p.M, p.N, out_features, 1};
}
constexpr GemmProblem input_grad_product(const LinearProblem& p) { return {p.M, p.K, p.N, 1}; }
// Both terms as one product, for estimates.
constexpr GemmProblem input_grad_estimate(const LinearProblem& p) {
  constexpr int64_t kTileK = GemmKernel::kTileK;
  return {p.M, p.K, 2 * (gemm_model::ceil_div(p.N, kTileK) * kTileK), 1};
}

template <size_t kCount>
constexpr const char* grad_decline_reason(const GemmProblem& product, const int (&kernels)[kCount],
                                          const DeviceLimits& device) {
  if (const char* reason = gemm_decline_reason(product, device)) return reason;
  if (!gemm_model::any_is_usable(kernels, product, device))
    return "more than 2^30 output tiles, or a single SM";
  return nullptr;
}
}  // namespace gated_model

// Why the kernels don't take the backward of a gated op over rows, or nullptr; out_features is 0
// for gated_linear. Sizes aren't negative.
constexpr const char* gated_grad_decline_reason(const LinearProblem& problem, int64_t out_features,
                                                const DeviceLimits& device) {
  if (problem.N == 0 || problem.K == 0) return "no features";
  if (problem.N % 8 != 0 || out_features % 8 != 0) return "features that are no multiple of 8";
  if (out_features > 0) {
    if (const char* reason = gated_model::grad_decline_reason(
            gated_model::hidden_grad_product(problem, out_features), kGatedGradKernels, device)) {
      return reason;
    }
  }
  return gated_model::grad_decline_reason(gated_model::input_grad_estimate(problem),
                                          kInputGradKernels, device);
}

constexpr GemmConfig hidden_grad_config(const LinearProblem& problem, int64_t out_features,
                                        const DeviceLimits& device) {
  constexpr double kEpilogue = gated_model::kGradEpilogueClocks;
  const GemmProblem product = gated_model::hidden_grad_product(problem, out_features);
  return gemm_config_of(gemm_model::best_of(kGatedGradKernels, product, device, kEpilogue).kernel,
                        product, device, kEpilogue);
}
constexpr GemmConfig input_grad_config(const LinearProblem& problem, const DeviceLimits& device) {
  const GemmProblem both = gated_model::input_grad_estimate(problem);
  GemmConfig config =
      gemm_config_of(gemm_model::best_of(kInputGradKernels, both, device).kernel, both, device);
  config.k_steps /= 2;  // of a term
  return config;
}
// For problems with rows and without a decline reason.
constexpr GatedGradConfig gated_grad_config(const LinearProblem& problem, int64_t out_features,
                                            bool wants_input, const DeviceLimits& device) {
  GatedGradConfig config{};
  config.has_hidden = out_features > 0;
  if (config.has_hidden) config.hidden = hidden_grad_config(problem, out_features, device);
  config.has_input = wants_input && problem.K % 8 == 0;
  if (config.has_input) config.input = input_grad_config(problem, device);
  return config;
}

// For explain: the configs as JSON.
inline std::string to_json(const ProductConfig& config) {
  return config.streams ? to_json(config.stream) : to_json(config.gemm);
}
namespace gated_model {
template <class Config>
std::string launches_json(const char* kernel, const Config& config) {
  return "{\"kernel\": \"" + std::string(kernel) +
         "\", \"launches\": " + std::to_string(config.launches()) +
         ", \"packed_weights\": " + std::to_string(config.packed_weights);
}
}  // namespace gated_model
inline std::string to_json(const LinearActConfig& config) {
  return gated_model::launches_json("linear_act_sm90", config) +
         ", \"product\": " + to_json(config.product) + "}";
}
inline std::string to_json(const GatedLinearConfig& config) {
  return gated_model::launches_json("gated_linear_sm90", config) +
         ", \"product\": " + to_json(config.product) + "}";
}
inline std::string to_json(const GatedMlpConfig& config) {
  return gated_model::launches_json("gated_mlp_sm90", config) +
         ", \"hidden\": " + to_json(config.hidden) + ", \"down\": " + to_json(config.down) + "}";
}

inline std::string to_json(const GatedGradConfig& config) {
  return "{\"kernel\": \"" +
         std::string(config.has_hidden ? "gated_mlp_grad_sm90" : "gated_grad_sm90") +
         "\", \"packed_weights\": " + std::to_string(config.packed_weights) +
         ", \"hidden\": " + (config.has_hidden ? to_json(config.hidden) : "null") +
         ", \"input\": " + (config.has_input ? to_json(config.input) : "null") + "}";
}

}  // namespace ikbo
