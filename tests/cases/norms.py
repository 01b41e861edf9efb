from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .case import Case, Maker

# Cases name arguments; make() puts them into the order of the schema, with its defaults.
NORM = {
    "x": None, "weight": None, "bias": None, "eps": 1e-5, "weight_offset": 0.0, "out_dtype": None,
    "normalized_ndim": 1,
}  # fmt: skip
ADD_NORM = {
    "x": None, "residual": None, "weight": None, "bias": None, "eps": 1e-5, "weight_offset": 0.0,
    "out_dtype": None, "residual_dtype": None, "normalized_ndim": 1,
}  # fmt: skip
NORM_QUANT = {
    "x": None, "weight": None, "bias": None, "scale": None, "eps": 1e-5, "weight_offset": 0.0,
    "normalized_ndim": 1,
}  # fmt: skip
ADD_NORM_QUANT = {
    "x": None, "residual": None, "weight": None, "bias": None, "scale": None, "eps": 1e-5,
    "weight_offset": 0.0, "residual_dtype": None, "normalized_ndim": 1,
}  # fmt: skip


def schema_of(op: str) -> dict[str, Any]:
    """The argument names of a norm in order, with the values norm_args leaves unless told."""
    if op.endswith("_quant"):
        return ADD_NORM_QUANT if op.startswith("add_") else NORM_QUANT
    return ADD_NORM if op.startswith("add_") else NORM


def norm_args(
    op: str,
    device: str,
    dtype: torch.dtype,
    *,
    sizes: tuple[int, ...] = (5, 3, 16),
    ndim: int = 1,
    weight: torch.dtype | bool = True,
    bias: torch.dtype | bool = True,
    residual: torch.dtype | None = None,
    scale: float | None = None,
    **scalars: Any,
) -> tuple[Any, ...]:
    """Arguments of a norm. `weight`, `bias`: whether there is one, or its dtype."""
    t = Maker(device, dtype)
    values: dict[str, Any] = {**scalars, "x": t(*sizes)}
    if op.startswith("add_"):
        values["residual"] = t(*sizes, dtype=residual)
    for name, given in (("weight", weight), ("bias", bias)):
        if given:
            values[name] = t(*sizes[-ndim:], dtype=given if given is not True else None)
    if scale is not None:
        values["scale"] = torch.full((1,), scale, device=device)
    if not weight and not bias:
        values["normalized_ndim"] = ndim
    order = schema_of(op)
    assert values.keys() <= order.keys(), values.keys() - order.keys()
    return tuple({**order, **values}.values())


def head_norm_args(
    device: str, dtype: torch.dtype, *, sizes: tuple[int, ...] = (4, 3, 2, 8), fused: bool = False,
    weight: torch.dtype | None = None, weight_offset: float = 0.0,
) -> tuple[Any, ...]:  # fmt: skip
    """x is the q of a fused qkv where asked for: a strided slice."""
    t = Maker(device, dtype)
    x = t(*sizes[:-2], 3, *sizes[-2:])[..., 1, :, :] if fused else t(*sizes)
    return x, t(*sizes[-2:], dtype=weight), 1e-5, weight_offset


def _case(op: str, label: str, **kwargs: Any) -> Case:
    make: Callable[[str, torch.dtype], tuple[Any, ...]]
    make = lambda device, dtype: norm_args(op, device, dtype, **kwargs)  # noqa: E731
    plain = not op.endswith("_quant")
    return Case(op, label, make, has_fwd=plain, has_out=op in ("rms_norm", "layer_norm"))


_KINDS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")

CASES = [
    *(_case(op, "affine", weight=torch.float32, bias=torch.float32, weight_offset=1.0)
      for op in _KINDS),
    *(_case(op, "two_dims", sizes=(4, 2, 9), ndim=2, bias=False, out_dtype=torch.float32)
      for op in _KINDS),
    *(_case(op, "bare_no_rows", sizes=(0, 8), weight=False, bias=False) for op in _KINDS),
    *(_case(op, "two_residual_dtypes", residual=torch.float64, residual_dtype=torch.float32)
      for op in _KINDS if op.startswith("add_")),
    *(_case(f"{op}_quant", "row_scales") for op in _KINDS),
    *(_case(f"{op}_quant", "one_scale", scale=0.25, sizes=(2, 3, 7), ndim=2, bias=False)
      for op in _KINDS),
    Case("head_norm", "dense", head_norm_args),
    Case("head_norm", "fused_qkv",
         lambda d, t: head_norm_args(d, t, fused=True, weight_offset=1.0)),
    Case("head_norm", "no_rows", lambda d, t: head_norm_args(d, t, sizes=(0, 2, 8))),
]  # fmt: skip
