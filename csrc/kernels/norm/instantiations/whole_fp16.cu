#include "kernels/norm/whole_launch.cuh"

namespace ikbo::norm {
IKBO_NORM_WHOLE(__half)
}  // namespace ikbo::norm
