#include "kernels/gemm/join_launch.cuh"

namespace ikbo::gemm {
IKBO_JOIN_TEMPLATES(, __half)
}  // namespace ikbo::gemm
