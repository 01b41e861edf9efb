"""Every op's definition in plain, differentiable PyTorch, the usual way: with the broadcast.

Written for clarity, in whatever dtype the arguments have; tests call them in float64. Rows without
a user follow the rule of the library: -1 gives zero, any other value outside [0, U) gives NaN.
"""

from .attention import candidate_attention
from .gated import gated_linear, gated_mlp, linear_act
from .linear import ACTIVATIONS, concat_linear, linear_compression
from .norms import add_layer_norm, add_rms_norm, head_norm, layer_norm, quantize, rms_norm

__all__ = [
    "ACTIVATIONS",
    "add_layer_norm",
    "add_rms_norm",
    "candidate_attention",
    "concat_linear",
    "gated_linear",
    "gated_mlp",
    "head_norm",
    "layer_norm",
    "linear_act",
    "linear_compression",
    "quantize",
    "rms_norm",
]
