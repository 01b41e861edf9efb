#include "kernels/candidate_attention/candidate_attention_launch.cuh"

namespace ikbo {
namespace {

template <class T>
void run(const AttentionOperands& operands, const AttentionConfig& config, cudaStream_t stream) {
  attention::for_each_kernel<T>([&]<class S>(int kernel) {
    if (kernel == config.kernel) attention::launch_kernel<S>(operands, config, stream);
  });
}

}  // namespace

void run_candidate_attention(const AttentionOperands& operands, const AttentionConfig& config,
                             cudaStream_t stream) {
  if (operands.type == ElementType::kBfloat16) {
    run<__nv_bfloat16>(operands, config, stream);
  } else {
    run<__half>(operands, config, stream);
  }
}

int64_t attention_kept_bytes(const AttentionConfig& config) {
  int64_t bytes = 0;
  attention::for_each_kernel<__half>([&]<class S>(int kernel) {
    if (kernel == config.kernel) bytes = sizeof(attention::KeptResults<S>);
  });
  return config.ctas * bytes;
}

void load_candidate_attention() {
  const auto load = [&]<class S>(int) { load_kernel(attention::candidate_attention_sm90<S>); };
  attention::for_each_kernel<__nv_bfloat16>(load);
  attention::for_each_kernel<__half>(load);
}

}  // namespace ikbo
