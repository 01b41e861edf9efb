// CUDA errors as exceptions. All CUDA calls of the library go through its own (static) runtime, so
// the sticky last error is checked here and never through torch.
#pragma once

#include <cuda_runtime_api.h>

namespace ikbo {

// Throws std::runtime_error naming the call, the error and, for a driver older than the runtime,
// what to install.
void throw_cuda_error(cudaError_t error, const char* call);

#define IKBO_CUDA_CHECK(call)                                                   \
  do {                                                                          \
    const cudaError_t ikbo_error = (call);                                      \
    if (ikbo_error != cudaSuccess) ::ikbo::throw_cuda_error(ikbo_error, #call); \
  } while (false)

}  // namespace ikbo
