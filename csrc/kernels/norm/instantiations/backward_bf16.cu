#include "kernels/norm/backward_launch.cuh"

namespace ikbo::norm {
IKBO_NORM_BACKWARD(__nv_bfloat16)
}  // namespace ikbo::norm
