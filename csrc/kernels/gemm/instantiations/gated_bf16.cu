#include "kernels/gemm/gated_launch.cuh"

namespace ikbo::gemm {
IKBO_GATED_TEMPLATES(, __nv_bfloat16)
}  // namespace ikbo::gemm
