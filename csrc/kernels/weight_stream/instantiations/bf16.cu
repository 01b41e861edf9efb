#include "kernels/weight_stream/weight_stream_launch.cuh"

namespace ikbo::weight_stream {
IKBO_WEIGHT_STREAM_TEMPLATES(, __nv_bfloat16)
}  // namespace ikbo::weight_stream
