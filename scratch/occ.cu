#include "../../tests/device/entry.h"
namespace ikbo { __global__ void __launch_bounds__(160) nothing() {} }
IKBO_TEST_ENTRY scratch_occ(int64_t cluster, int64_t shared, int64_t* n) {
  return ikbo::entry([&] {
    using namespace ikbo;
    IKBO_CUDA_CHECK(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    IKBO_CUDA_CHECK(cudaFuncSetAttribute(nothing, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    IKBO_CUDA_CHECK(cudaFuncSetAttribute(nothing, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    cudaLaunchConfig_t c{}; c.gridDim = dim3(cluster * 1024); c.blockDim = dim3(160); c.dynamicSmemBytes = shared;
    cudaLaunchAttribute a; a.id = cudaLaunchAttributeClusterDimension; a.val.clusterDim = {unsigned(cluster), 1, 1}; c.attrs = &a; c.numAttrs = 1;
    int k = 0; IKBO_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&k, nothing, &c)); *n = k;
  });
}
