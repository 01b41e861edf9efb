"""Every op's definition in plain, differentiable PyTorch, the usual way: with the broadcast.

Written for clarity, in whatever dtype the arguments have; tests call them in float64. Rows without a
user follow the rule of the library: -1 gives zero, any other value outside [0, U) gives NaN.
"""

from .attention import candidate_attention
from .linear import ACTIVATIONS, concat_linear, linear_compression

__all__ = ["ACTIVATIONS", "candidate_attention", "concat_linear", "linear_compression"]
