// What the library asks of a device, read once per device.
#pragma once

#include <cstdint>

namespace ikbo {

struct DeviceProperties {
  int capability_major;
  int capability_minor;
  int sm_count;
  int64_t l2_bytes;
  int max_shared_bytes_per_block;  // with the opt-in attribute

  bool is_hopper() const { return capability_major == 9 && capability_minor == 0; }
};

const DeviceProperties& device_properties(int device);

// How many SMs persistent kernels may fill: the device's, or fewer under set_sm_limit
// (process-wide; 0 lifts the limit).
int usable_sm_count(int device);
void set_sm_limit(int sms);
int sm_limit();

}  // namespace ikbo
