// The one place kernels are launched from.
#pragma once

#include <cuda_runtime.h>

#include "launch/error.h"

namespace ikbo {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  int shared_bytes = 0;  // dynamic shared memory a CTA
  int cluster = 1;       // CTAs a cluster, along x; divides grid.x
  // Programmatic dependent launch: the kernel may start once the one ahead of it on the stream says
  // so (allow_next_kernel()), or else once that one has ended. It calls wait_for_previous_kernel()
  // before it touches what that one touches. Of what the kernels before that one touch it may be
  // sure only where that one waited for them before it said so, as most of this library's do.
  bool overlaps_previous = false;
};

// Launches kernel(arguments...) on the stream and checks the launch. Parameters are converted to
// the kernel's own types. An empty grid launches nothing.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
            Arguments&&... arguments) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  // Static and dynamic shared memory together pass 48 KB only with the attribute.
  if (shape.shared_bytes > 0) {
    IKBO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         shape.shared_bytes));
  }
  if (shape.cluster > 8) {
    IKBO_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  if (shape.overlaps_previous) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  IKBO_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

// Loads the kernel's code onto the current device now, so that the first launch doesn't have to
// (loading is lazy, slow, and not allowed under stream capture).
template <class... Parameters>
void load_kernel(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes;
  IKBO_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
}

}  // namespace ikbo
