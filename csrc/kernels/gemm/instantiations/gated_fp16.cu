#include "kernels/gemm/gated_launch.cuh"

namespace ikbo::gemm {
IKBO_GATED_TEMPLATES(, __half)
}  // namespace ikbo::gemm
