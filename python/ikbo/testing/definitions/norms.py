"""Definitions of the norms. Statistics are taken over the weight's (or bias's) dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_E4M3 = 448.0


def _dims(weight: Tensor | None, bias: Tensor | None, normalized_ndim: int) -> list[int]:
    given = weight if weight is not None else bias
    return list(range(-(normalized_ndim if given is None else given.dim()), 0))


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, weight_offset: float) -> Tensor:
    if weight is not None:
        y = y * (weight + weight_offset)
    return y if bias is None else y + bias


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    normalized_ndim: int = 1,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) + bias."""
    dims = _dims(weight, bias, normalized_ndim)
    y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return _affine(y, weight, bias, weight_offset).to(out_dtype or x.dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    normalized_ndim: int = 1,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias, with the biased variance."""
    centre = x - x.mean(_dims(weight, bias, normalized_ndim), keepdim=True)
    return rms_norm(centre, weight, bias, eps, weight_offset, out_dtype or x.dtype, normalized_ndim)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    y = rms_norm(x + residual, weight, bias, eps, weight_offset, out_dtype or x.dtype,
                 normalized_ndim)  # fmt: skip
    return y, (x + residual).to(residual_dtype or residual.dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual)."""
    y = layer_norm(x + residual, weight, bias, eps, weight_offset, out_dtype or x.dtype,
                   normalized_ndim)  # fmt: skip
    return y, (x + residual).to(residual_dtype or residual.dtype)


def head_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0) -> Tensor:
    """rms_norm over the last dimension of [..., H, D], with a weight [H, D]."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (y * (weight + weight_offset)).to(x.dtype)


def quantize(y: Tensor, scale: Tensor | None = None, ndim: int = 1) -> tuple[Tensor, Tensor]:
    """(y / scale as float8_e4m3fn, scale), the scale in a shape that broadcasts over y.

    Without a scale, each row (the last ``ndim`` dimensions) gets the one that makes its largest
    value 448.
    """
    if scale is None:
        scale = y.abs().amax(list(range(-ndim, 0)), keepdim=True).div(_LARGEST_E4M3).float()
        scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    y_q = (y / scale).clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
    return y_q, scale
