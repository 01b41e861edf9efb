// Boxes between global and shared memory by the copy engine.
#include "entry.h"
#include "hopper/cluster.cuh"
#include "hopper/mbarrier.cuh"
#include "hopper/tma.cuh"
#include "launch/tensor_map.h"

namespace ikbo {
namespace {

using hopper::Barrier;
using hopper::L2Hint;

constexpr int kThreads = 128;

// Shared memory: the box, rounded up to 1024 bytes, then the barrier.
__device__ Barrier& barrier_after(char* box, uint32_t bytes) {
  return *reinterpret_cast<Barrier*>(box + (bytes + 1023) / 1024 * 1024);
}

// All bits set (NaN) where the copy engine will write.
__device__ void poison(char* box, uint32_t bytes) {
  if (hopper::shared_address(box) % 1024 != 0) __trap();
  for (uint32_t i = threadIdx.x; i < bytes / 4; i += kThreads) {
    reinterpret_cast<uint32_t*>(box)[i] = 0xffffffffu;
  }
  hopper::fence_shared_for_async();
}

__device__ void write_out(uint32_t* out, const char* box, uint32_t bytes) {
  for (uint32_t i = threadIdx.x; i < bytes / 4; i += kThreads) {
    out[i] = reinterpret_cast<const uint32_t*>(box)[i];
  }
}

// out = the bytes of the box at `at`, as they stand in shared memory.
template <int kRank>
__global__ void __launch_bounds__(kThreads)
    tma_load_test_kernel(const __grid_constant__ CUtensorMap map, int4 at, uint32_t bytes,
                         L2Hint hint, uint32_t* out) {
  extern __shared__ __align__(1024) char box[];
  Barrier& barrier = barrier_after(box, bytes);
  if (threadIdx.x == 0) {
    hopper::prefetch_tensor_map(map);
    hopper::init(barrier, 1);
    hopper::fence_barrier_init();
  }
  poison(box, bytes);
  __syncthreads();
  if (threadIdx.x == 0) {
    hopper::arrive_expect_bytes(barrier, bytes);
    if constexpr (kRank == 2) hopper::tma_load(box, map, barrier, hint, at.x, at.y);
    if constexpr (kRank == 3) hopper::tma_load(box, map, barrier, hint, at.x, at.y, at.z);
    if constexpr (kRank == 4) hopper::tma_load(box, map, barrier, hint, at.x, at.y, at.z, at.w);
  }
  hopper::wait(barrier, 0);
  write_out(out, box, bytes);
}

// Two CTAs load a box each, at `at` and one box further along dimension 1, into both: out[cta]
// holds the two boxes one after the other.
template <int kRank>
__global__ void __launch_bounds__(kThreads)
    tma_multicast_test_kernel(const __grid_constant__ CUtensorMap map, int4 at, int box_rows,
                              uint32_t bytes, uint32_t* out) {
  extern __shared__ __align__(1024) char boxes[];
  Barrier& barrier = barrier_after(boxes, 2 * bytes);
  if (threadIdx.x == 0) {
    hopper::init(barrier, 1);
    hopper::fence_barrier_init();
  }
  poison(boxes, 2 * bytes);
  hopper::cluster_sync();
  if (threadIdx.x == 0) {
    const uint32_t rank = hopper::cluster_cta_rank();
    char* box = boxes + rank * bytes;
    const int y = at.y + rank * box_rows;
    constexpr L2Hint kHint = L2Hint::kNormal;
    hopper::arrive_expect_bytes(barrier, 2 * bytes);
    if constexpr (kRank == 2) hopper::tma_load_multicast(box, map, barrier, kHint, 3, at.x, y);
    if constexpr (kRank == 3) {
      hopper::tma_load_multicast(box, map, barrier, kHint, 3, at.x, y, at.z);
    }
    if constexpr (kRank == 4) {
      hopper::tma_load_multicast(box, map, barrier, kHint, 3, at.x, y, at.z, at.w);
    }
  }
  hopper::wait(barrier, 0);
  write_out(out + blockIdx.x * (2 * bytes / 4), boxes, 2 * bytes);
  hopper::cluster_sync();
}

// Stores the bytes of `in` as the box at `at`.
template <int kRank>
__global__ void __launch_bounds__(kThreads)
    tma_store_test_kernel(const __grid_constant__ CUtensorMap map, int4 at, uint32_t bytes,
                          L2Hint hint, const uint32_t* in) {
  extern __shared__ __align__(1024) char box[];
  if (hopper::shared_address(box) % 1024 != 0) __trap();
  for (uint32_t i = threadIdx.x; i < bytes / 4; i += kThreads) {
    reinterpret_cast<uint32_t*>(box)[i] = in[i];
  }
  hopper::fence_shared_for_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    if constexpr (kRank == 2) hopper::tma_store(map, box, hint, at.x, at.y);
    if constexpr (kRank == 3) hopper::tma_store(map, box, hint, at.x, at.y, at.z);
    if constexpr (kRank == 4) hopper::tma_store(map, box, hint, at.x, at.y, at.z, at.w);
    hopper::tma_store_commit();
    hopper::tma_store_wait_read<0>();
    hopper::tma_store_wait<0>();
  }
}

struct Box {
  CUtensorMap map;
  int4 at;
  uint32_t bytes;
};

Box make_box(int rank, int type, bool swizzled, const void* base, const int64_t* sizes,
             const int64_t* strides, const int64_t* box, const int* at) {
  const auto element = static_cast<ElementType>(type);
  const Swizzle swizzle = swizzled ? Swizzle::k128Bytes : Swizzle::kNone;
  Box made{};
  const int64_t *n = sizes, *s = strides, *b = box;
  if (rank == 2) {
    made.map = make_tensor_map(base, element, {n[0], n[1]}, {s[0]}, {b[0], b[1]}, swizzle);
  } else if (rank == 3) {
    made.map = make_tensor_map(base, element, {n[0], n[1], n[2]}, {s[0], s[1]}, {b[0], b[1], b[2]},
                               swizzle);
  } else {
    made.map = make_tensor_map(base, element, {n[0], n[1], n[2], n[3]}, {s[0], s[1], s[2]},
                               {b[0], b[1], b[2], b[3]}, swizzle);
  }
  made.at = {at[0], at[1], rank > 2 ? at[2] : 0, rank > 3 ? at[3] : 0};
  made.bytes = element == ElementType::kFloat32 ? 4 : 2;
  for (int i = 0; i < rank; ++i) made.bytes *= static_cast<uint32_t>(box[i]);
  return made;
}

int shared_bytes(uint32_t boxes) {
  return static_cast<int>((boxes + 1023) / 1024 * 1024 + sizeof(Barrier));
}

L2Hint hint_of(int hint) {
  constexpr L2Hint kHints[] = {L2Hint::kNormal, L2Hint::kEvictFirst, L2Hint::kEvictLast};
  return kHints[hint];
}

}  // namespace
}  // namespace ikbo

using namespace ikbo;

// rank 2 to 4; type an ElementType; sizes, box and `at` innermost first in elements, strides in
// bytes; hint: normal, evict first, evict last.
IKBO_TEST_ENTRY ikbo_test_tma_load(int rank, int type, bool swizzled, const void* base,
                                   const int64_t* sizes, const int64_t* strides, const int64_t* box,
                                   const int* at, int hint, uint32_t* out, cudaStream_t stream) {
  return entry([&] {
    const Box b = make_box(rank, type, swizzled, base, sizes, strides, box, at);
    constexpr void (*kKernels[])(CUtensorMap, int4, uint32_t, L2Hint, uint32_t*) = {
        tma_load_test_kernel<2>, tma_load_test_kernel<3>, tma_load_test_kernel<4>};
    launch(kKernels[rank - 2], {1, kThreads, shared_bytes(b.bytes)}, stream, b.map, b.at, b.bytes,
           hint_of(hint), out);
  });
}

IKBO_TEST_ENTRY ikbo_test_tma_multicast(int rank, int type, bool swizzled, const void* base,
                                        const int64_t* sizes, const int64_t* strides,
                                        const int64_t* box, const int* at, uint32_t* out,
                                        cudaStream_t stream) {
  return entry([&] {
    const Box b = make_box(rank, type, swizzled, base, sizes, strides, box, at);
    constexpr void (*kKernels[])(CUtensorMap, int4, int, uint32_t, uint32_t*) = {
        tma_multicast_test_kernel<2>, tma_multicast_test_kernel<3>, tma_multicast_test_kernel<4>};
    launch(kKernels[rank - 2], {2, kThreads, shared_bytes(2 * b.bytes), 2}, stream, b.map, b.at,
           static_cast<int>(box[1]), b.bytes, out);
  });
}

IKBO_TEST_ENTRY ikbo_test_tma_store(int rank, int type, bool swizzled, void* base,
                                    const int64_t* sizes, const int64_t* strides,
                                    const int64_t* box, const int* at, int hint, const uint32_t* in,
                                    cudaStream_t stream) {
  return entry([&] {
    const Box b = make_box(rank, type, swizzled, base, sizes, strides, box, at);
    constexpr void (*kKernels[])(CUtensorMap, int4, uint32_t, L2Hint, const uint32_t*) = {
        tma_store_test_kernel<2>, tma_store_test_kernel<3>, tma_store_test_kernel<4>};
    launch(kKernels[rank - 2], {1, kThreads, shared_bytes(b.bytes)}, stream, b.map, b.at, b.bytes,
           hint_of(hint), in);
  });
}
