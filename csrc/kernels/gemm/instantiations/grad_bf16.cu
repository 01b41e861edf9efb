#include "kernels/gemm/grad_launch.cuh"

namespace ikbo::gemm {
IKBO_GRAD_TEMPLATES(, __nv_bfloat16)
}  // namespace ikbo::gemm
