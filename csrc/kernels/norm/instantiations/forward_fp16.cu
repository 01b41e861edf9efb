#include "kernels/norm/forward_launch.cuh"

namespace ikbo::norm {
IKBO_NORM_FORWARD(__half)
}  // namespace ikbo::norm
