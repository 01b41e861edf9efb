#include "launch/stream.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>

// The getter lives in libtorch_cuda. Weak, so that this library also loads under a CPU-only torch,
// where no CUDA tensor exists to ask for a stream.
#pragma weak aoti_torch_get_current_cuda_stream

namespace ikbo {

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr ||
      aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("ikbo: torch gave no current CUDA stream; is this torch CPU-only?");
  }
  return static_cast<cudaStream_t>(stream);
}

}  // namespace ikbo
