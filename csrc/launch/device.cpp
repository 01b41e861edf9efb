#include "launch/device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

#include "launch/error.h"

namespace ikbo {
namespace {

constexpr int kMaxDevices = 64;
std::atomic<int> limit{0};

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  IKBO_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
  return value;
}

}  // namespace

const DeviceProperties& device_properties(int device) {
  static std::array<std::once_flag, kMaxDevices> read;
  static std::array<DeviceProperties, kMaxDevices> properties;
  if (device < 0 || device >= kMaxDevices) {
    throw std::runtime_error("ikbo: expected a CUDA device below " + std::to_string(kMaxDevices) +
                             ", got " + std::to_string(device) + ".");
  }
  std::call_once(read[device], [&] {
    properties[device] = {attribute(cudaDevAttrComputeCapabilityMajor, device),
                          attribute(cudaDevAttrComputeCapabilityMinor, device),
                          attribute(cudaDevAttrMultiProcessorCount, device),
                          attribute(cudaDevAttrL2CacheSize, device),
                          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)};
  });
  return properties[device];
}

int usable_sm_count(int device) {
  const int all = device_properties(device).sm_count;
  const int allowed = limit.load(std::memory_order_relaxed);
  return allowed > 0 ? std::min(all, allowed) : all;
}

void set_sm_limit(int sms) { limit.store(std::max(0, sms)); }
int sm_limit() { return limit.load(); }

}  // namespace ikbo
