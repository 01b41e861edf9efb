// The products of few tokens for tests: any tile and split on raw pointers.

#include "entry.h"
#include "kernels/weight_stream/weight_stream_launch.cuh"

// out[M, N] = gelu_tanh(x w0^T + b0) (* (x w1^T + b1) with two weights) in bfloat16 by a cluster of
// `split` CTAs, in tiles for `ctas_per_sm` of them, or by the config's choice for 0. All
// contiguous; w1, biases and pre-activations may be null.
IKBO_TEST_ENTRY ikbo_test_weight_stream(const void* x, const void* w0, const void* w1,
                                        const void* b0, const void* b1, void* out, void* preact0,
                                        void* preact1, int64_t M, int64_t N, int64_t K,
                                        int64_t split, int64_t ctas_per_sm, int64_t sms,
                                        int64_t l2_bytes, cudaStream_t stream) {
  return ikbo::entry([&] {
    using namespace ikbo;
    constexpr int kMaxSharedBytes = 227 * 1024;
    const WeightStreamProblem problem{M, N, K, w1 == nullptr ? 1 : 2};
    const DeviceLimits device{static_cast<int>(sms), l2_bytes, kMaxSharedBytes};
    const WeightStreamConfig chosen = weight_stream_config(problem, device);
    while (split > chosen.k_steps) split /= 2;
    const WeightStreamConfig config =
        split == 0 ? chosen
                   : weight_stream_config_of(static_cast<int>(split), static_cast<int>(ctas_per_sm),
                                             problem, device);
    const weight_stream::Operands operands{
        x, K, {{w0, K, b0, preact0}, {w1, K, b1, preact1}}, out, N, Activation::kGeluTanh, false};
    weight_stream::for_each_kernel<__nv_bfloat16>([&]<class S>() {
      if (S::kTokens != config.tokens || S::kWeights != config.weights) return;
      weight_stream::launch_kernel<S>(operands, problem, config, stream);
    });
  });
}
