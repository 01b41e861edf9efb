// Which columns a CTA of a linear compression kernel multiplies, and when. Used by host and device:
// integers only.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ikbo {

// The output of one tile of W's rows is cut into units of 64 columns of one batch row. A worker
// (CTA) multiplies up to `consumers` units at once, one a consumer warp group, by the same blocks
// of W, which it streams round and round: step s brings block s % k_blocks.
//
// Over several rounds the consumers start a fraction of a round apart, each in the middle of W (the
// order of a sum is free), so that one's epilogue runs under the others' products.
struct ColumnSchedule {
  // Starting apart costs a part of a round at either end, so it must be worth it.
  static constexpr int32_t kMinRotatedRounds = 3;

  int32_t units = 0;
  int32_t workers = 0;
  int32_t consumers = 0;
  int32_t k_blocks = 0;
  // Rounds in which every consumer of every worker has a unit. The units after them are spread over
  // the workers first, then over their consumers.
  int32_t full_rounds = 0;
  int32_t leftover = 0;
  int32_t apart = 0;  // steps between the starts of neighbouring consumers

  constexpr ColumnSchedule() = default;
  // All at least 1.
  constexpr ColumnSchedule(int32_t units, int32_t workers, int32_t consumers, int32_t k_blocks)
      : units(units),
        workers(workers),
        consumers(consumers),
        k_blocks(k_blocks),
        full_rounds(units / (workers * consumers)),
        leftover(units % (workers * consumers)),
        apart(full_rounds >= kMinRotatedRounds ? k_blocks / consumers : 0) {}

  // Never more for a later worker or consumer than for an earlier one.
  constexpr int32_t tiles(int32_t worker, int32_t consumer) const {
    return full_rounds + (consumer * workers + worker < leftover ? 1 : 0);
  }
  // The unit of the consumer's tile number `tile`. Neighbouring workers have neighbouring units,
  // and all work near the same place of memory at a time.
  constexpr int32_t unit(int32_t worker, int32_t consumer, int32_t tile) const {
    const int32_t first = tile * workers * consumers;
    return first +
           (tile < full_rounds ? worker * consumers + consumer : consumer * workers + worker);
  }

  constexpr int32_t first_step(int32_t consumer) const { return consumer * apart; }
  constexpr int32_t end_step(int32_t worker, int32_t consumer) const {
    return first_step(consumer) + tiles(worker, consumer) * k_blocks;
  }
  constexpr int32_t steps(int32_t worker) const {
    int32_t last = 0;
    for (int32_t c = 0; c < consumers; ++c) last = std::max(last, end_step(worker, c));
    return last;
  }
};

}  // namespace ikbo
