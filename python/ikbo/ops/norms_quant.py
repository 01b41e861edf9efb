"""Norms with an fp8 result, for a matrix product in fp8 behind them."""

from __future__ import annotations

import torch
from torch import Tensor

from ._norm_registration import fake_statistics, normalized_dims
from ._registration import op, register_fake, register_not_differentiable


def _fake_quantized(x: Tensor, scale: Tensor | None, ndim: int) -> tuple[Tensor, Tensor]:
    sizes = x.shape[: x.dim() - ndim] if scale is None else (0,)
    y_q = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return y_q, x.new_empty(sizes, dtype=torch.float32)


def _register(name: str, n_statistics: int) -> None:
    def fake(  # type: ignore[no-untyped-def]
        x, weight=None, bias=None, scale=None, eps=0.0, weight_offset=0.0, normalized_ndim=1
    ):
        ndim = normalized_dims(weight, bias, normalized_ndim)
        statistics = (fake_statistics(x, ndim) for _ in range(n_statistics))
        return (*_fake_quantized(x, scale, ndim), *statistics)

    def add_fake(  # type: ignore[no-untyped-def]
        x, residual, weight=None, bias=None, scale=None, eps=0.0, weight_offset=0.0,
        residual_dtype=None, normalized_ndim=1,
    ):  # fmt: skip
        ndim = normalized_dims(weight, bias, normalized_ndim)
        residual_out = x.new_empty(x.shape, dtype=residual_dtype or residual.dtype)
        statistics = (fake_statistics(x, ndim, residual) for _ in range(n_statistics))
        return (*_fake_quantized(x, scale, ndim), residual_out, *statistics)

    register_fake(name, add_fake if name.startswith("add_") else fake)
    register_not_differentiable(name, f"ikbo.{name}: rounding to fp8 has no derivative")


_register("rms_norm_quant", 1)
_register("layer_norm_quant", 2)
_register("add_rms_norm_quant", 1)
_register("add_layer_norm_quant", 2)


def rms_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`rms_norm` rounded to fp8: ``y`` is close to ``y_q * scale``.

    y itself is never rounded to x's dtype. A row's results depend on that row alone. Not
    differentiable.

    Args:
        x, weight, bias, eps, weight_offset, normalized_ndim: as in :func:`rms_norm`.
        scale: float32, one element: ``y_q = y / scale``, saturated to +-448. Without it each row
            gets its own, ``max |y| / 448`` (at least the smallest normal float32, so that a row
            of zeros stays one).

    Returns:
        ``y_q`` float8_e4m3fn in the shape of x, ``scale`` float32 (x's shape less the normalised
        dimensions; size 0 where one was given) and ``rstd``. A NaN in a row makes it NaN.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    y_q, scales, rstd = op("rms_norm_quant")(
        x, weight, bias, scale, eps, weight_offset, normalized_ndim
    )
    return y_q, scales, rstd


def layer_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`layer_norm` rounded to fp8; see :func:`rms_norm_quant`.

    Returns:
        ``(y_q, scale, mean, rstd)``.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    y_q, scales, mean, rstd = op("layer_norm_quant")(
        x, weight, bias, scale, eps, weight_offset, normalized_ndim
    )
    return y_q, scales, mean, rstd


def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual_dtype: torch.dtype | None = None,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`add_rms_norm` rounded to fp8; see :func:`rms_norm_quant`.

    Returns:
        ``(y_q, scale, residual_out, rstd)``.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    y_q, scales, residual_out, rstd = op("add_rms_norm_quant")(
        x, residual, weight, bias, scale, eps, weight_offset, residual_dtype, normalized_ndim
    )
    return y_q, scales, residual_out, rstd


def add_layer_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual_dtype: torch.dtype | None = None,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`add_layer_norm` rounded to fp8; see :func:`rms_norm_quant`.

    Returns:
        ``(y_q, scale, residual_out, mean, rstd)``.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    y_q, scales, residual_out, mean, rstd = op("add_layer_norm_quant")(
        x, residual, weight, bias, scale, eps, weight_offset, residual_dtype, normalized_ndim
    )
    return y_q, scales, residual_out, mean, rstd
