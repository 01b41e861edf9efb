#include "launch/error.h"

#include <stdexcept>
#include <string>

namespace ikbo {

void throw_cuda_error(cudaError_t error, const char* call) {
  std::string text = "ikbo: CUDA call " + std::string(call) +
                     " failed: " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) +
                     ").";
  if (error == cudaErrorInsufficientDriver) {
    text += " ikbo carries the CUDA 13 runtime, which needs NVIDIA driver r580 or newer.";
  }
  throw std::runtime_error(text);
}

}  // namespace ikbo
