// Warp groups: indices, one lane of a warp, registers handed over, named barriers.
#include <cstdint>

#include "entry.h"
#include "hopper/warp_group.cuh"

namespace ikbo {
namespace {

enum class Named { kReady = 1, kDone };

constexpr int kLive = 190;  // more values than an equal share of the registers holds

// Group 0 gives registers away and hands the input on through shared memory, `rounds` times; group
// 1 waits for it and sums. Group 2 keeps kLive values alive, which needs the registers it took.
// out[0..2]: elected lanes of each group, out[3..5]: its warps' indices (a mask), then group 1's
// sums and group 2's.
__global__ void __launch_bounds__(3 * hopper::kWarpGroupThreads, 1)
    warp_group_test_kernel(int rounds, const int* in, int* out) {
  __shared__ int handed[hopper::kWarpGroupThreads];
  const int group = hopper::warp_group_index();
  const int thread = threadIdx.x % hopper::kWarpGroupThreads;
  constexpr int kBoth = 2 * hopper::kWarpGroupThreads;
  const int warp = hopper::warp_index();  // by all lanes: one alone would wait for the others
  if (hopper::elect_one()) {
    atomicAdd(&out[group], 1);
    atomicOr(&out[3 + group], 1 << warp);
  }
  int* sums = out + 6;
  if (group == 0) {
    hopper::give_registers<40>();
    for (int round = 0; round < rounds; ++round) {
      if (round > 0) hopper::barrier_wait(Named::kDone, kBoth);
      handed[127 - thread] = in[round * hopper::kWarpGroupThreads + thread];
      hopper::barrier_arrive(Named::kReady, kBoth);
    }
  } else if (group == 1) {
    hopper::take_registers<216>();
    int sum = 0;
    for (int round = 0; round < rounds; ++round) {
      hopper::barrier_wait(Named::kReady, kBoth);
      sum += (round + 1) * handed[thread];
      if (round + 1 < rounds) hopper::barrier_arrive(Named::kDone, kBoth);
    }
    sums[thread] = sum;
  } else {
    hopper::take_registers<216>();
    uint32_t values[kLive];
#pragma unroll
    for (int i = 0; i < kLive; ++i) values[i] = in[thread] + i;
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
      for (int i = 0; i < kLive; ++i) values[i] = values[i] * 3 + values[(i + 1) % kLive];
    }
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kLive; ++i) sum ^= values[i];
    sums[hopper::kWarpGroupThreads + thread] = static_cast<int>(sum);
  }
}

}  // namespace
}  // namespace ikbo

// in[rounds][128], out[6 + 256], zero.
IKBO_TEST_ENTRY ikbo_test_warp_group(int rounds, const int* in, int* out, cudaStream_t stream) {
  return ikbo::entry([&] {
    ikbo::launch(ikbo::warp_group_test_kernel, {1, 3 * ikbo::hopper::kWarpGroupThreads}, stream,
                 rounds, in, out);
  });
}
