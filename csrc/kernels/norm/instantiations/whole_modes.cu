#include "kernels/norm/backward_whole_sm90.cuh"
namespace ikbo::norm {
#define K(T, L, V, S) {norm_backward_whole_sm90<T, L, V, S, 0>, norm_backward_whole_sm90<T, L, V, S, 1>, norm_backward_whole_sm90<T, L, V, S, 2>, norm_backward_whole_sm90<T, L, V, S, 3>, norm_backward_whole_sm90<T, L, V, S, 4>, norm_backward_whole_sm90<T, L, V, S, 5>, norm_backward_whole_sm90<T, L, V, S, 6>, norm_backward_whole_sm90<T, L, V, S, 7>}
#define M(T, E, L, V) \
  if (type == ElementType::E && w.lanes == L && w.vectors == V) { \
    const WholeKernel k[2][8] = {K(T, L, V, false), K(T, L, V, true)}; \
    return k[w.sums][mode]; }
WholeKernel whole_mode(ElementType type, const NormWhole& w, int mode) {
  M(__nv_bfloat16, kBfloat16, 128, 1) M(__nv_bfloat16, kBfloat16, 256, 1) M(__nv_bfloat16, kBfloat16, 512, 1)
  M(__nv_bfloat16, kBfloat16, 512, 3) M(__nv_bfloat16, kBfloat16, 512, 4) M(float, kFloat32, 512, 4)
  return nullptr;
}
}  // namespace ikbo::norm
