// Pace: SMs are not equally fast, and who has which rows doesn't change. So who is more turns ahead
// of the average of all than the lead waits before it loads on.
#pragma once

#include <cstdint>

#include "hopper/memory_order.cuh"

namespace ikbo::norm {

// By one thread of a team, after its `turn` turns. `counter` has the turns of all `teams`, of which
// those of a cluster count as one: `counts` for one of its CTAs. `seen` is the thread's own, 0 at
// first. The counter is looked at a turn late, when it costs no wait. It can't grow while CTAs are
// not on the GPU yet: who has waited in vain doesn't wait again.
__device__ inline void keep_pace(uint32_t* counter, uint32_t lead, bool counts, uint32_t turn,
                                 uint32_t teams, uint32_t& seen) {
  constexpr uint32_t kNoWait = ~0u;
  if (counts) hopper::add_relaxed_gpu(counter, 1);
  uint32_t now = seen;
  if (now == kNoWait) return;
  const uint32_t least = turn > lead ? (turn - lead) * teams : 0;
  for (int tries = 0; now < least; ++tries) {
    now = tries < 100 ? hopper::load_relaxed_gpu(counter) : kNoWait;
  }
  seen = now == kNoWait ? kNoWait : hopper::load_relaxed_gpu(counter);
}

}  // namespace ikbo::norm
