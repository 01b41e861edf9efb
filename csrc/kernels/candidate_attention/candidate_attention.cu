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

int64_t attention_zeros(const AttentionConfig& config) {
  if (config.tickets) return 1;
  if (config.shared_blocks == 0) return 0;
  return config.ctas * attention::KeptFlags<attention::Shape<__half, k128SharesKeys>>::kOfCta;
}

int64_t attention_kept_bytes(const AttentionConfig& config) {
  if (config.shared_blocks == 0 && config.parts == 1) return 0;
  const int64_t count = config.parts > 1 ? int64_t{config.most_tiles} * config.parts : config.ctas;
  int64_t bytes = 0;
  attention::for_each_kernel<__half>([&]<class S>(int kernel) {  // alike for either type
    if (kernel == config.kernel) bytes = count * sizeof(attention::KeptResults<S>);
  });
  return bytes;
}

void load_candidate_attention() {
  const auto load = [&]<class S>(int) {
    load_kernel(attention::candidate_attention_sm90<S>);
    if constexpr (attention::kCutsKeys<S>) load_kernel(attention::add_attention_parts<S>);
  };
  attention::for_each_kernel<__nv_bfloat16>(load);
  attention::for_each_kernel<__half>(load);
}

}  // namespace ikbo
