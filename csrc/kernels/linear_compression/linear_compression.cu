#include "kernels/linear_compression/linear_compression_launch.cuh"

namespace ikbo {

void run_linear_compression(const LinearCompressionOperands& operands,
                            const LinearCompressionProblem& problem,
                            const LinearCompressionConfig& config, cudaStream_t stream) {
  if (operands.type == ElementType::kBfloat16) {
    linear_compression::run<__nv_bfloat16>(operands, problem, config, stream);
  } else {
    linear_compression::run<__half>(operands, problem, config, stream);
  }
}

void load_linear_compression() {
  const auto load = [&]<class S>(int) {
    load_kernel(linear_compression::linear_compression_sm90<S>);
  };
  linear_compression::for_each_kernel<__nv_bfloat16>(load);
  linear_compression::for_each_kernel<__half>(load);
}

}  // namespace ikbo
