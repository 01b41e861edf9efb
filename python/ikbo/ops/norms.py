"""RMSNorm and LayerNorm, alone or behind a residual addition, and RMSNorm per attention head."""

from __future__ import annotations

import torch
from torch import Tensor

from ._norm_registration import register_add_norm, register_head_norm, register_norm
from ._registration import op

register_norm("rms_norm", centred=False)
register_norm("layer_norm", centred=True)
register_add_norm("add_rms_norm", centred=False)
register_add_norm("add_layer_norm", centred=True)
register_head_norm()


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    normalized_ndim: int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Root-mean-square normalisation over the last dimensions.

    ``y = x * rsqrt(mean(x**2) + eps) * (weight + weight_offset) + bias``, computed in float32
    (float64 for float64) and rounded once. The bits of a row depend on that row alone, not on how
    many rows there are; the same holds for the gradient of x. Differentiable twice.

    Args:
        x: float16, bfloat16, float32 or float64, any strides. Keeps its dtype under autocast.
        weight: the shape of x's last dimensions, which are the ones normalised over, or None. Any
            floating dtype.
        bias: like weight, or None.
        eps: added to the mean of squares.
        weight_offset: added to weight in float32: 1 for a weight stored as its distance from 1.
        out_dtype: dtype of the result; x's by default.
        normalized_ndim: how many dimensions to normalise over where there is no weight or bias.
        out: preallocated result; inference only.

    Returns:
        y in the shape of x.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    args = (x, weight, bias, eps, weight_offset, out_dtype, normalized_ndim)
    if out is not None:
        op("rms_norm.out")(*args, out=out)
        return out
    y: Tensor = op("rms_norm")(*args)
    return y


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    normalized_ndim: int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Layer normalisation over the last dimensions.

    ``y = (x - mean) * rsqrt(var + eps) * (weight + weight_offset) + bias`` with the biased variance
    ``var = mean((x - mean)**2)``, so that a mean far larger than the deviation does no harm.
    Arguments, precision, and independence of the row count are those of :func:`rms_norm`.

    Returns:
        y in the shape of x.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    args = (x, weight, bias, eps, weight_offset, out_dtype, normalized_ndim)
    if out is not None:
        op("layer_norm.out")(*args, out=out)
        return out
    y: Tensor = op("layer_norm")(*args)
    return y


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
    """:func:`rms_norm` of ``x + residual``, and that sum.

    The sum is taken in float32 (float64 where x or residual is float64) and normalised unrounded;
    ``residual_out`` is its rounding. The backward takes ``residual_out`` for what was normalised.

    Args:
        x, residual: of one shape; their dtypes may differ, e.g. a float32 residual.
        weight, bias, eps, weight_offset, normalized_ndim: as in :func:`rms_norm`.
        out_dtype: dtype of y; x's by default.
        residual_dtype: dtype of residual_out; residual's by default.

    Returns:
        ``(y, residual_out)`` in the shape of x.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    y, residual_out = op("add_rms_norm")(
        x, residual, weight, bias, eps, weight_offset, out_dtype, residual_dtype, normalized_ndim
    )
    return y, residual_out


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
    """:func:`layer_norm` of ``x + residual``, and that sum; see :func:`add_rms_norm`.

    Returns:
        ``(y, residual_out)`` in the shape of x.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    y, residual_out = op("add_layer_norm")(
        x, residual, weight, bias, eps, weight_offset, out_dtype, residual_dtype, normalized_ndim
    )
    return y, residual_out


def head_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0) -> Tensor:
    """RMSNorm of every attention head over its D values, with a weight per head.

    ``y[h] = x[h] * rsqrt(mean(x[h]**2) + eps) * (weight[h] + weight_offset)`` for each head h, with
    the precision and independence of the row count of :func:`rms_norm`.

    Args:
        x: ``[..., H, D]``, e.g. the slice of a fused qkv that holds q: it isn't copied.
        weight: ``[H, D]`` in any floating dtype; expand a ``[D]`` weight that all heads share.
        eps: added to the mean of squares.
        weight_offset: added to weight in float32.

    Returns:
        y in the shape and dtype of x, contiguous.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    y: Tensor = op("head_norm")(x, weight, eps, weight_offset)
    return y
