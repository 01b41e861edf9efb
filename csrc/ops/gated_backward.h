// The backward of the gated ops and of linear_act: on a Hopper GPU in 16 bits by kernels and the
// library's products, elsewhere by the reference.
#pragma once

#include "ops/gated_reference.h"
#include "ops/record.h"

namespace ikbo {

// As gated_backward_reference; records the path.
GatedGrads gated_backward(OpPaths& paths, const Tensor& grad_out, const Tensor& x,
                          const Tensor& w_gate, const Tensor& w_up, const OptTensor& w_down,
                          const GatedSides& saved, Activation activation, int64_t grad_mask);

struct LinearGrads {
  Tensor x, w, b;  // in the order of grad_mask's bits
};
// Of linear_act on a Hopper GPU in 16 bits, all as rows. `saved` is the pre-activation or, where it
// will do, the output; nothing where there is no activation.
LinearGrads linear_act_backward(const Tensor& grad_out, const Tensor& x, const Tensor& w,
                                const OptTensor& saved, Activation activation, int64_t grad_mask);

}  // namespace ikbo
