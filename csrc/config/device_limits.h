// What a configuration depends on of a device.
#pragma once

#include <cstdint>

namespace ikbo {

struct DeviceLimits {
  int sm_count;  // SMs a persistent kernel may fill
  int64_t l2_bytes;
  int max_shared_bytes_per_cta;  // with the opt-in attribute
};

}  // namespace ikbo
