// The activations of the linear ops, as ATen calls on tensors in an accumulation type.
#pragma once

#include "ops/tensor.h"

namespace ikbo {

enum class Activation { kNone, kRelu, kRelu2, kSilu, kGelu, kGeluTanh, kSigmoid };

// From its name in the schema; raises with the list of names for any other.
Activation parse_activation(const char* op, const std::string& name);

// True where the derivative can't be had from the output, so that training saves the pre-activation.
bool needs_preactivation(Activation activation);

Tensor apply_activation(Activation activation, const Tensor& pre);

// grad * act'(pre). `saved` is the pre-activation where needs_preactivation(), else the output.
Tensor activation_backward(Activation activation, const Tensor& grad, const Tensor& saved);

}  // namespace ikbo
