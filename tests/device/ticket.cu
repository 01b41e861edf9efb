// Tiles by ticket.
#include "entry.h"
#include "hopper/ticket.cuh"

namespace ikbo {
namespace {

constexpr int kReaderWarps = 3;

// Warp 0 draws; the others add 1, 256 and 65536 to visits[tile].
__global__ void __launch_bounds__(32 * (1 + kReaderWarps))
    ticket_test_kernel(uint32_t tiles, uint32_t* counter, uint32_t* visits) {
  using Tickets = hopper::Tickets<2, kReaderWarps>;
  __shared__ Tickets tickets;
  if (threadIdx.x == 0) {
    tickets.init();
    hopper::fence_barrier_init();
  }
  __syncthreads();
  Tickets::Position position;
  const int warp = threadIdx.x / 32;
  if (warp == 0) {
    if (threadIdx.x == 0) {
      while (tickets.draw(position, counter) < tiles) position.advance();
    }
    return;
  }
  for (;;) {
    const uint32_t tile = tickets.read(position);
    if (tile >= tiles) break;
    position.advance();
    if (threadIdx.x % 32 == 0) atomicAdd(&visits[tile], 1u << 8 * (warp - 1));
  }
}

}  // namespace
}  // namespace ikbo

IKBO_TEST_ENTRY ikbo_test_tickets(int ctas, uint32_t tiles, uint32_t* counter, uint32_t* visits,
                                  cudaStream_t stream) {
  return ikbo::entry([&] {
    ikbo::launch(ikbo::ticket_test_kernel, {static_cast<unsigned>(ctas), 128}, stream, tiles,
                 counter, visits);
  });
}
