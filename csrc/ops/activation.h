// The activations of the linear ops, as ATen calls on tensors in an accumulation type.
#pragma once

#include "config/activation.h"
#include "ops/tensor.h"

namespace ikbo {

// From its name in the schema; raises with the list of names for any other.
Activation parse_activation(const char* op, const std::string& name);

// True where the derivative can't be had from the output, so that training saves the
// pre-activation.
bool needs_preactivation(Activation activation);

Tensor apply_activation(Activation activation, const Tensor& pre);

// grad * act'(pre). `saved` is the pre-activation where needs_preactivation(), else the output.
Tensor activation_backward(Activation activation, const Tensor& grad, const Tensor& saved);

// What NAME_fwd saves for the backward: the pre-activation, or nothing where the output will do.
inline Tensor allocate_preactivation(const Tensor& out, Activation activation) {
  return needs_preactivation(activation) ? empty(sizes_of(out), out.scalar_type(), out)
                                         : nothing(out.scalar_type(), out);
}

}  // namespace ikbo
