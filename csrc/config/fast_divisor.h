// Division of tile indices by a divisor known at launch: a multiplication and a shift.
#pragma once

#include <cstdint>

namespace ikbo {

// Exact for dividends and divisors below 2^31: the multiplier exceeds 2^shift / divisor by less
// than 1, so the quotient is too large by less than 2^31 / 2^shift <= 1 / divisor, and its floor is
// right.
class FastDivisor {
 public:
  constexpr FastDivisor() = default;
  constexpr explicit FastDivisor(int32_t divisor) : divisor_(divisor) {
    while ((int64_t{1} << (shift_ - 31)) < divisor) ++shift_;
    const uint64_t power = uint64_t{1} << shift_;
    multiplier_ = static_cast<uint32_t>((power + divisor - 1) / divisor);
  }

  constexpr int32_t divisor() const { return divisor_; }
  constexpr int32_t divide(int32_t dividend) const {
    // From 32 unsigned bits: the product is one wide multiplication on the device.
    const uint64_t product = uint64_t{static_cast<uint32_t>(dividend)} * multiplier_;
    return static_cast<int32_t>(product >> shift_);
  }
  constexpr int32_t remainder(int32_t dividend, int32_t quotient) const {
    return dividend - quotient * divisor_;
  }

 private:
  int32_t divisor_ = 1;
  uint32_t multiplier_ = uint32_t{1} << 31;
  int shift_ = 31;
};

}  // namespace ikbo
