// How fast weights come into shared memory: boxes, splits, bytes under way. No products.
#include "../../tests/device/entry.h"
#include "hopper/mbarrier.cuh"
#include "hopper/tma.cuh"
#include "hopper/bulk_copy.cuh"
#include "hopper/dependent_launch.cuh"
#include <cudaTypedefs.h>
#include <stdexcept>
namespace ikbo {
struct P { CUtensorMap map; const char* base; int64_t bytes_a_cta; int F, R, kb, slots, steps, split_log2, hint, linear; };
__global__ void __launch_bounds__(32) bw(const __grid_constant__ P p) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ hopper::Barrier full[64];
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.slots; ++i) hopper::init(full[i], 1);
    hopper::fence_barrier_init();
    const uint32_t bytes = p.R * 128 * p.kb;
    const hopper::L2Hint hint = p.hint ? hopper::L2Hint::kEvictFirst : hopper::L2Hint::kNormal;
    const int tile = blockIdx.x >> p.split_log2, rank = blockIdx.x & ((1 << p.split_log2) - 1);
    const int all = p.steps / p.kb, first = all * rank >> p.split_log2, last = all * (rank + 1) >> p.split_log2;
    const int groups = p.F / p.R;
    const int n = p.linear ? int(p.bytes_a_cta / bytes) : (last - first) * groups;
    auto issue = [&](int i, int slot) {
      hopper::arrive_expect_bytes(full[slot], bytes);
      if (p.linear) {
        hopper::bulk_load(smem + slot * bytes, p.base + blockIdx.x * p.bytes_a_cta + int64_t(i) * bytes, bytes, full[slot]);
      } else {
        const int step = first + i / groups, g = i % groups;
        for (int k = 0; k < p.kb; ++k)
          hopper::tma_load(smem + slot * bytes + k * p.R * 128, p.map, full[slot], hint, (step * p.kb + k) * 64, tile * p.F + g * p.R);
      }
    };
    for (int i = 0; i < min(n, p.slots); ++i) issue(i, i);
    int slot = 0; uint32_t phase = 0;
    for (int i = 0; i < n; ++i) {
      hopper::wait(full[slot], phase);
      if (i + p.slots < n) issue(i + p.slots, slot);
      if (++slot == p.slots) slot = 0, phase ^= 1;
    }
  }
}
}
IKBO_TEST_ENTRY scratch_bw(const void* w, int64_t N, int64_t K, int64_t F, int64_t R, int64_t kb, int64_t slots, int64_t split_log2, int64_t hint, int64_t promo, int64_t linear, int64_t shared, int64_t grid, cudaStream_t stream) {
  return ikbo::entry([&] {
    using namespace ikbo;
    P p{}; p.base = static_cast<const char*>(w); p.F = F, p.R = R, p.kb = kb, p.slots = slots, p.steps = K / 64, p.split_log2 = split_log2, p.hint = hint, p.linear = linear;
    if (!linear) {
      void* f = nullptr; cudaDriverEntryPointQueryResult q;
      IKBO_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &q));
      cuuint64_t sizes[2] = {cuuint64_t(K), cuuint64_t(N)}, strides[1] = {cuuint64_t(K) * 2}; cuuint32_t box[2] = {64, cuuint32_t(R)}, ones[2] = {1, 1};
      const CUtensorMapL2promotion pr[] = {CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
      if (reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f)(&p.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(w), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, pr[promo], CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) throw std::runtime_error("map");
    }
    p.bytes_a_cta = N * K * 2 / grid / 128 * 128;
    LaunchShape shape{unsigned(grid), 32}; shape.shared_bytes = shared;
    IKBO_CUDA_CHECK(cudaFuncSetAttribute(bw, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    launch(bw, shape, stream, p);
  });
}
