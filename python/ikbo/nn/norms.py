"""torch.nn's norms over ikbo's ops."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops


class RMSNorm(nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` by :func:`ikbo.rms_norm`: same arguments, state dict and results.

    ``eps=None`` is the machine epsilon of the type sums are kept in: float64's for float64, else
    float32's. Under autocast the result keeps x's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``[..., *normalized_shape]`` -> the same shape."""
        _check_shape(self, x)
        eps = self.eps
        if eps is None:
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            eps = torch.finfo(wide).eps
        return ops.rms_norm(x, self.weight, eps=eps, normalized_ndim=len(self.normalized_shape))


class LayerNorm(nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` by :func:`ikbo.layer_norm`: same arguments, state dict, results.

    Under autocast the result keeps x's dtype.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[..., *normalized_shape]`` -> the same shape."""
        _check_shape(self, input)
        return ops.layer_norm(
            input,
            self.weight,
            self.bias,
            eps=self.eps,
            normalized_ndim=len(self.normalized_shape),
        )


def _check_shape(module: RMSNorm | LayerNorm, x: Tensor) -> None:
    # The ops take the shape from the weight, which elementwise_affine=False lacks.
    normalized = tuple(module.normalized_shape)
    if x.shape[-len(normalized) :] != normalized:
        raise ValueError(
            f"ikbo.nn.{type(module).__name__}: expected x of shape "
            f"[..., {', '.join(map(str, normalized))}], got {list(x.shape)}. "
            "Construct the module with normalized_shape equal to x's last dimensions."
        )
