#include "kernels/norm/whole_launch.cuh"

namespace ikbo::norm {
IKBO_NORM_WHOLE(float)
}  // namespace ikbo::norm
