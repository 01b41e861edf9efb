#include "kernels/norm/backward_launch.cuh"

namespace ikbo::norm {
IKBO_NORM_BACKWARD(__half)
}  // namespace ikbo::norm
