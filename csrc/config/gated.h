// How gated_linear, linear_act and gated_mlp are computed: which kernel each product gets. A pure
// function of problem and device, tested on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
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

// A product of so few features has a kernel of its own, and no need of whole chunks of 16 bytes.
inline constexpr int kMaxNarrowFeatures = 8;

// With more, the GEMM has a tile for every SM.
inline constexpr int64_t kMaxStreamedTokens = 4096;

enum class ProductKernel { kGemm, kWeightStream, kNarrow };

// Few features go to the narrow kernel, few tokens to the one that streams the weights, all others
// to the GEMM; but products that leave SMs without a tile of it may be streamed too.
struct ProductConfig {
  ProductKernel kernel;
  WeightStreamConfig stream;  // of kWeightStream
  GemmConfig gemm;            // of kGemm; of two weights it counts the columns of both
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

// The kernel of the problem, which is the GEMM only where the weight stream isn't estimated
// quicker.
constexpr ProductKernel kernel_of(const LinearProblem& p, int weights) {
  const bool few_tokens = p.M <= WeightStreamKernel::kMaxTokens;
  // Eight features of few tokens are a tile of the weight stream, which splits K.
  if (weights == 1 && p.N <= kMaxNarrowFeatures && (p.N % 8 != 0 || !few_tokens)) {
    return ProductKernel::kNarrow;
  }
  return few_tokens ? ProductKernel::kWeightStream : ProductKernel::kGemm;
}

template <size_t kCount>
constexpr const char* decline_reason(const LinearProblem& problem, int weights,
                                     const GemmProblem& product, const int (&kernels)[kCount],
                                     const DeviceLimits& device) {
  if (problem.K == 0) return "inputs without features";
  const ProductKernel kernel = kernel_of(problem, weights);
  if (kernel == ProductKernel::kNarrow) {
    constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
    return std::max(problem.M, problem.K) > kMaxSize ? "a size of 2^31 or more" : nullptr;
  }
  if (problem.N % 8 != 0) return "out features that are no multiple of 8";
  if (kernel == ProductKernel::kWeightStream) {
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
  config.kernel = kernel_of(problem, weights);
  if (config.kernel == ProductKernel::kWeightStream) {
    config.stream = weight_stream_config(stream_problem(problem, weights), device);
  } else if (config.kernel == ProductKernel::kGemm) {
    const int kernel = gemm_model::best_of(kernels, product, device, epilogue_clocks).kernel;
    config.gemm = gemm_config_of(kernel, product, device, epilogue_clocks);
    const WeightStreamProblem streamed = stream_problem(problem, weights);
    if (problem.M <= kMaxStreamedTokens &&
        weight_stream_decline_reason(streamed, device) == nullptr) {
      // It isn't persistent: more CTAs than SMs would leave a limit on SMs behind.
      config.stream = weight_stream_config(streamed, device, 1);
      const bool is_quicker =
          config.stream.clocks < config.gemm.clocks + weight_stream_model::kStartClocks;
      if (is_quicker && config.stream.ctas() <= device.sm_count) {
        config.kernel = ProductKernel::kWeightStream;
      }
    }
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
// pre-activations, element by element or in the epilogue of a GEMM with w_down; and the input's
// gradient, by a GEMM or the library.
struct GatedGradConfig {
  bool has_hidden;     // there is a w_down, and its GEMM
  GemmConfig hidden;   // with it
  bool has_input;      // the input's gradient is wanted, and there is a GEMM
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
constexpr bool is_taken(const GemmProblem& product, const int (&kernels)[kCount],
                        const DeviceLimits& device) {
  return product.N % 8 == 0 && product.K % 8 == 0 &&
         gemm_decline_reason(product, device) == nullptr &&
         gemm_model::any_is_usable(kernels, product, device);
}
}  // namespace gated_model

// Why the kernels don't take the backward of a gated op, or nullptr. Sizes aren't negative.
constexpr const char* gated_grad_decline_reason(const LinearProblem& problem) {
  return problem.N == 0 || problem.K == 0 ? "no features" : nullptr;
}

// For problems with rows and without a decline reason; out_features is 0 for gated_linear.
constexpr GatedGradConfig gated_grad_config(const LinearProblem& problem, int64_t out_features,
                                            bool wants_input, const DeviceLimits& device) {
  using namespace gated_model;
  GatedGradConfig config{};
  const GemmProblem hidden = hidden_grad_product(problem, out_features);
  config.has_hidden = out_features > 0 && is_taken(hidden, kGatedGradKernels, device);
  if (config.has_hidden) {
    const int kernel =
        gemm_model::best_of(kGatedGradKernels, hidden, device, kGradEpilogueClocks).kernel;
    config.hidden = gemm_config_of(kernel, hidden, device, kGradEpilogueClocks);
  }
  const GemmProblem both = input_grad_estimate(problem);
  config.has_input = wants_input && problem.N % 8 == 0 && is_taken(both, kInputGradKernels, device);
  if (config.has_input) {
    const int kernel = gemm_model::best_of(kInputGradKernels, both, device).kernel;
    config.input = gemm_config_of(kernel, both, device);
    config.input.k_steps /= 2;  // of a term
  }
  return config;
}

// For explain: the configs as JSON.
inline std::string to_json(const ProductConfig& config) {
  switch (config.kernel) {
    case ProductKernel::kGemm:
      return to_json(config.gemm);
    case ProductKernel::kWeightStream:
      return to_json(config.stream);
    case ProductKernel::kNarrow:
      return "{\"kernel\": \"narrow_sm90\"}";
  }
  return "null";
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
