// The activations of the linear ops, by name in the schemas.
#pragma once

namespace ikbo {

enum class Activation { kNone, kRelu, kRelu2, kSilu, kGelu, kGeluTanh, kSigmoid };

}  // namespace ikbo
