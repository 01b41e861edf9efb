// The linear compression kernels on raw pointers, with the clocks that each CTA takes.

#include "entry.h"
#include "kernels/linear_compression/linear_compression_launch.cuh"

namespace ikbo {
namespace {

template <class S>
__global__ void __launch_bounds__(LinearCompressionKernel::kThreads, 1)
    timed_kernel(const __grid_constant__ linear_compression::Params params, int64_t* clocks) {
  // The start waits in memory: a register for it would be one too many.
  if (threadIdx.x == 0) clocks[blockIdx.x] = -clock64();
  linear_compression::run_cta<S>(params);
  __syncthreads();
  if (threadIdx.x == 0) clocks[blockIdx.x] += clock64();
}

}  // namespace
}  // namespace ikbo

// out[b] = w e[b] + part[cand_to_user[b]] in bfloat16 by the kernel of that index, all contiguous
// but for w's rows. Without a map, w e[b]. clocks: int64, one a CTA, or null for the kernel as it
// is shipped.
IKBO_TEST_ENTRY ikbo_test_linear_compression(const void* w, int64_t w_stride, const void* e,
                                             void* out, const void* part,
                                             const int32_t* cand_to_user, int64_t n_users,
                                             bool part_is_under_way, int64_t rows, int64_t M,
                                             int64_t N, int64_t K, int64_t kernel, int64_t sms,
                                             int64_t* clocks, cudaStream_t stream) {
  return ikbo::entry([&] {
    using namespace ikbo;
    constexpr int kMaxSharedBytes = 227 * 1024;
    const LinearCompressionProblem problem{rows, M, N, K};
    const DeviceLimits device{static_cast<int>(sms), 50 << 20, kMaxSharedBytes};
    const auto config = linear_compression_config_of(static_cast<int>(kernel), problem,
                                                     cand_to_user != nullptr, device);
    LinearCompressionOperands o{ElementType::kBfloat16, w, w_stride, e, N, K * N, out};
    o.part = part;
    o.part_is_under_way = part_is_under_way;
    o.cand_to_user = cand_to_user;
    o.n_users = n_users;
    linear_compression::for_each_kernel<__nv_bfloat16>([&]<class S>(int index) {
      if (index != config.kernel) return;
      const auto params = linear_compression::make_params<S>(o, problem, config);
      const auto shape = linear_compression::launch_shape<S>(o, config);
      if (clocks != nullptr) {
        launch(timed_kernel<S>, shape, stream, params, clocks);
      } else {
        launch(linear_compression::linear_compression_sm90<S>, shape, stream, params);
      }
    });
  });
}
