#include "kernels/norm/backward_launch.cuh"

namespace ikbo::norm {
IKBO_NORM_BACKWARD(float)
}  // namespace ikbo::norm
