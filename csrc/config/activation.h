// The activations of the linear ops.
#pragma once

namespace ikbo {

enum class Activation { kNone, kRelu, kRelu2, kSilu, kGelu, kGeluTanh, kSigmoid };

}  // namespace ikbo
