// The linear compression kernels on raw pointers, with the clocks that each CTA takes.

#include "entry.h"
#include "kernels/linear_compression/linear_compression_launch.cuh"

namespace ikbo {
namespace {

template <class S>
__global__ void __launch_bounds__(LinearCompressionKernel::kThreads, 1)
    timed_kernel(const __grid_constant__ linear_compression::Params params, int64_t* clocks) {
  const int64_t start = clock64();
  linear_compression::run_cta<S>(params);
  __syncthreads();
  if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - start;
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

// out[b] = act(w_cand e_cand[b] + w_user e_user[cand_to_user[b]]) in bfloat16 by the split kernel
// with the tile of kernel `kernel`; both weights' rows w_stride elements apart.
IKBO_TEST_ENTRY ikbo_test_linear_compression_split(
    const void* w_cand, int64_t w_cand_stride, const void* e_cand, int64_t B, int64_t Kc,
    const void* w_user, int64_t w_user_stride, const void* e_user, int64_t U, int64_t Ku, void* out,
    const int32_t* cand_to_user, int64_t M, int64_t N, int64_t kernel, cudaStream_t stream) {
  return ikbo::entry([&] {
    using namespace ikbo;
    const LinearCompressionProblem problem{B, M, N, Kc}, users{U, M, N, Ku};
    LinearCompressionOperands c{
        ElementType::kBfloat16, w_cand, w_cand_stride, e_cand, N, Kc * N, out};
    c.cand_to_user = cand_to_user;
    c.n_users = U;
    const LinearCompressionOperands u{
        ElementType::kBfloat16, w_user, w_user_stride, e_user, N, Ku * N, nullptr};
    const auto config = linear_compression_split_of(static_cast<int>(kernel), problem);
    linear_compression::for_each_kernel<__nv_bfloat16>([&]<class S>(int index) {
      if (index != config.kernel) return;
      using Split = linear_compression::SplitShape<typename S::T, S::kIndex>;
      linear_compression::run_split_kernel<Split>(c, problem, &u, users, config, stream);
    });
  });
}
