// The index arithmetic of csrc/hopper for tests/test_hopper_index.py, compiled for the host.
#define __host__
#define __device__
#include <cstdint>

#include "hopper/descriptor.cuh"
#include "hopper/ring_position.cuh"
#include "hopper/swizzle.cuh"

using namespace ikbo::hopper;

namespace {

template <int kSlots>
void move(const uint32_t* steps, int count, bool one_by_one, uint32_t* slot_and_phase) {
  RingPosition<kSlots> position;
  for (int i = 0; i < count; ++i) {
    if (one_by_one) {
      for (uint32_t step = 0; step < steps[i]; ++step) position.advance();
    } else {
      position.advance(steps[i]);
    }
  }
  slot_and_phase[0] = static_cast<uint32_t>(position.slot);
  slot_and_phase[1] = position.phase;
}

}  // namespace

extern "C" {

uint32_t swizzle(uint32_t row, uint32_t byte) { return swizzle_128(row, byte); }

uint64_t descriptor_of(bool mn_major, uint32_t address, uint32_t block_bytes) {
  return mn_major ? descriptor_bits<Major::kMn>(address, block_bytes)
                  : descriptor_bits<Major::kK>(address, block_bytes);
}

uint64_t descriptor_step(bool mn_major) {
  return mn_major ? kDescriptorStep<Major::kMn> : kDescriptorStep<Major::kK>;
}

void ring_position(int slots, const uint32_t* steps, int count, bool one_by_one, uint32_t* out) {
  switch (slots) {
    case 1:
      return move<1>(steps, count, one_by_one, out);
    case 3:
      return move<3>(steps, count, one_by_one, out);
    case 4:
      return move<4>(steps, count, one_by_one, out);
    case 7:
      return move<7>(steps, count, one_by_one, out);
  }
}
}
