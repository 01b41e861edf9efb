#include "kernels/norm/whole_launch.cuh"

namespace ikbo::norm {
IKBO_NORM_WHOLE(__nv_bfloat16)
}  // namespace ikbo::norm
