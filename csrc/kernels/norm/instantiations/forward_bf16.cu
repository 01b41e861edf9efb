#include "kernels/norm/forward_launch.cuh"

namespace ikbo::norm {
IKBO_NORM_FORWARD(__nv_bfloat16)
}  // namespace ikbo::norm
