// Pace: SMs are not equally fast, and who has which rows doesn't change. So who is more turns ahead
// of the average of all than the lead waits before it loads on.
#pragma once

#include <cstdint>

#include "hopper/memory_order.cuh"

namespace ikbo::norm {

// By one thread of a team, after its `turn` turns. `counter` has the turns of all `teams`, of which
// those of a cluster count as one: `counts` for one of its CTAs. `seen` is what it returned a turn
// before, 0 at first: the counter is looked at a turn late. Who stores what is returned waits for
// it, a trip to L2: behind a pass over a row that costs nothing, in front of it up to 5 %. The
// counter can't grow while CTAs are not on the GPU yet: who has waited in vain doesn't wait again.
__device__ inline uint32_t keep_pace(uint32_t* counter, uint32_t lead, bool counts, uint32_t turn,
                                     uint32_t teams, uint32_t seen) {
  constexpr uint32_t kNoWait = ~0u;
  if (counts) hopper::add_relaxed_gpu(counter, 1);
  if (seen == kNoWait) return kNoWait;
  const uint32_t least = turn > lead ? (turn - lead) * teams : 0;
  for (int tries = 0; seen < least; ++tries) {
    seen = tries < 100 ? hopper::load_relaxed_gpu(counter) : kNoWait;
  }
  return seen == kNoWait ? kNoWait : hopper::load_relaxed_gpu(counter);
}

}  // namespace ikbo::norm
