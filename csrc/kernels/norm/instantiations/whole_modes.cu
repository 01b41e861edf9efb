#include "kernels/norm/backward_whole_sm90.cuh"
namespace ikbo::norm {
WholeKernel whole_mode(ElementType type, const NormWhole& w, int mode) {
#define M(T, E, L, V)                                                                              \
  if (type == ElementType::E && w.lanes == L && w.vectors == V) {                                  \
    const WholeKernel k[2][4] = {                                                                  \
        {norm_backward_whole_sm90<T, L, V, false, 0>, norm_backward_whole_sm90<T, L, V, false, 1>, \
         norm_backward_whole_sm90<T, L, V, false, 2>,                                              \
         norm_backward_whole_sm90<T, L, V, false, 3>},                                             \
        {norm_backward_whole_sm90<T, L, V, true, 0>, norm_backward_whole_sm90<T, L, V, true, 1>,   \
         norm_backward_whole_sm90<T, L, V, true, 2>, norm_backward_whole_sm90<T, L, V, true, 3>}}; \
    return k[w.sums][mode];                                                                        \
  }
  M(__nv_bfloat16, kBfloat16, 128, 1)
  M(__nv_bfloat16, kBfloat16, 256, 1) M(__nv_bfloat16, kBfloat16, 512, 1)
      M(__nv_bfloat16, kBfloat16, 512, 3) M(__nv_bfloat16, kBfloat16, 512, 4)
          M(float, kFloat32, 512, 4) return nullptr;
}
}  // namespace ikbo::norm
