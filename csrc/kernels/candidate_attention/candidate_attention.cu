#include "kernels/candidate_attention/candidate_attention_launch.cuh"

namespace ikbo {
namespace {

// A launch of its own that overlaps on either side, which a library's fill doesn't: that cost 2 us.
// The kernel waits for this one, which waits for the one ahead: nothing overtakes.
__global__ void clear_words(uint32_t* words, int count) {
  hopper::allow_next_kernel();
  hopper::wait_for_previous_kernel();
  for (int i = threadIdx.x; i < count; i += blockDim.x) words[i] = 0;
}

template <class T>
void run(const AttentionOperands& operands, const AttentionConfig& config, cudaStream_t stream) {
  attention::for_each_kernel<T>([&]<class S>(int kernel) {
    if (kernel == config.kernel) attention::launch_kernel<S>(operands, config, stream);
  });
}

}  // namespace

void run_candidate_attention(const AttentionOperands& operands, const AttentionConfig& config,
                             cudaStream_t stream) {
  if (const int count = static_cast<int>(attention_words(config)); count > 0) {
    LaunchShape shape{1, 256};
    shape.overlaps_previous = true;
    launch(clear_words, shape, stream, operands.words, count);
  }
  if (operands.type == ElementType::kBfloat16) {
    run<__nv_bfloat16>(operands, config, stream);
  } else {
    run<__half>(operands, config, stream);
  }
}

int64_t attention_words(const AttentionConfig& config) {
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
  load_kernel(clear_words);
  const auto load = [&]<class S>(int) {
    load_kernel(attention::candidate_attention_sm90<S>);
    if constexpr (attention::kCutsKeys<S>) load_kernel(attention::add_attention_parts<S>);
  };
  attention::for_each_kernel<__nv_bfloat16>(load);
  attention::for_each_kernel<__half>(load);
}

}  // namespace ikbo
