#include "kernels/candidate_attention/candidate_attention_launch.cuh"

namespace ikbo {
namespace {

// A launch of its own that overlaps on either side, which a library's fill doesn't: that cost 2 us.
// The kernel waits for this one, which waits for the one ahead: nothing overtakes.
__global__ void clear_ticket(uint32_t* ticket) {
  hopper::allow_next_kernel();
  hopper::wait_for_previous_kernel();
  if (threadIdx.x == 0) *ticket = 0;
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
  if (config.tickets) {
    LaunchShape shape{1, 32};
    shape.overlaps_previous = true;
    launch(clear_ticket, shape, stream, operands.ticket);
  }
  if (operands.type == ElementType::kBfloat16) {
    run<__nv_bfloat16>(operands, config, stream);
  } else {
    run<__half>(operands, config, stream);
  }
}

int64_t attention_kept_bytes(const AttentionConfig& config) {
  if (config.parts == 1) return 0;
  const int64_t count = int64_t{config.most_tiles} * config.parts;
  int64_t bytes = 0;
  attention::for_each_kernel<__half>([&]<class S>(int kernel) {  // alike for either type
    if (kernel == config.kernel) bytes = count * sizeof(attention::KeptResults<S>);
  });
  return bytes;
}

void load_candidate_attention() {
  load_kernel(clear_ticket);
  const auto load = [&]<class S>(int) {
    load_kernel(attention::candidate_attention_sm90<S>);
    if constexpr (attention::kCutsKeys<S>) load_kernel(attention::add_attention_parts<S>);
  };
  attention::for_each_kernel<__nv_bfloat16>(load);
  attention::for_each_kernel<__half>(load);
}

}  // namespace ikbo
