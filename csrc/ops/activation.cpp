#include "ops/activation.h"

#include "ops/checks.h"

namespace ikbo {

Activation parse_activation(const char* op, const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "relu") return Activation::kRelu;
  if (name == "relu2") return Activation::kRelu2;
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "sigmoid") return Activation::kSigmoid;
  fail(op, "expected activation to be none, relu, relu2, silu, gelu, gelu_tanh or sigmoid, got '",
       name, "'.");
}

bool needs_preactivation(Activation activation) {
  return activation == Activation::kRelu2 || activation == Activation::kSilu ||
         activation == Activation::kGelu || activation == Activation::kGeluTanh;
}

Tensor apply_activation(Activation activation, const Tensor& pre) {
  switch (activation) {
    case Activation::kNone:
      return pre;
    case Activation::kRelu:
      return aten("aten::relu", "", pre);
    case Activation::kRelu2: {
      const Tensor positive = aten("aten::relu", "", pre);
      return mul(positive, positive);
    }
    case Activation::kSilu:
      return aten("aten::silu", "", pre);
    case Activation::kGelu:
      return aten("aten::gelu", "", pre, std::string("none"));
    case Activation::kGeluTanh:
      return aten("aten::gelu", "", pre, std::string("tanh"));
    case Activation::kSigmoid:
      return aten("aten::sigmoid", "", pre);
  }
  throw std::logic_error("ikbo: unknown activation");
}

Tensor activation_backward(Activation activation, const Tensor& grad, const Tensor& saved) {
  switch (activation) {
    case Activation::kNone:
      return grad;
    case Activation::kRelu: {
      const Tensor zero = scalar(0, grad.scalar_type(), grad);
      const Tensor off = aten("aten::le", "Tensor", saved, scalar(0, saved.scalar_type(), saved));
      return where(off, zero, grad);
    }
    case Activation::kRelu2:
      return mul(grad, mul(aten("aten::relu", "", saved), 2.0));
    case Activation::kSilu:
      return aten("aten::silu_backward", "", grad, saved);
    case Activation::kGelu:
      return aten("aten::gelu_backward", "", grad, saved, std::string("none"));
    case Activation::kGeluTanh:
      return aten("aten::gelu_backward", "", grad, saved, std::string("tanh"));
    case Activation::kSigmoid:
      return aten("aten::sigmoid_backward", "", grad, saved);
  }
  throw std::logic_error("ikbo: unknown activation");
}

}  // namespace ikbo
