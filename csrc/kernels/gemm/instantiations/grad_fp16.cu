#include "kernels/gemm/grad_launch.cuh"

namespace ikbo::gemm {
IKBO_GRAD_TEMPLATES(, __half)
}  // namespace ikbo::gemm
