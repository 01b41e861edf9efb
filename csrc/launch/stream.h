#pragma once

#include <cuda_runtime_api.h>

namespace ikbo {

// torch's current stream on the device.
cudaStream_t current_stream(int device);

}  // namespace ikbo
