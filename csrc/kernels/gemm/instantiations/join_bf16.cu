#include "kernels/gemm/join_launch.cuh"

namespace ikbo::gemm {
IKBO_JOIN_TEMPLATES(, __nv_bfloat16)
}  // namespace ikbo::gemm
