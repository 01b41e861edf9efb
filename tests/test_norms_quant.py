"""Norms with an fp8 result: distance from the norm itself, scales, saturation, odd rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo.testing import definitions

from .cases import Maker
from .cases.norms import norm_args, schema_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"]
every_device = pytest.mark.parametrize("device", DEVICES)
every_kind = pytest.mark.parametrize("name", NAMES)
LARGEST, STEP, SMALLEST_STEP = 448.0, 2.0**-3, 2.0**-9  # of e4m3


def _quantize(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple(getattr(torch.ops.ikbo, f"{name}_quant")(*args))


def _fwd(name: str, args: tuple[Any, ...], **changes: Any) -> tuple[Tensor, ...]:
    """NAME_fwd on the arguments of NAME_quant."""
    given = dict(zip(schema_of(f"{name}_quant"), args, strict=True))
    del given["scale"]
    return tuple(getattr(torch.ops.ikbo, f"{name}_fwd")(**given, **changes))


def _exact(name: str, args: tuple[Any, ...]) -> Tensor:
    wide = tuple(a.double() if isinstance(a, Tensor) else a for a in args)
    return _fwd(name, wide)[0]


def _assert_rounded(y_q: Tensor, scale: Tensor, exact: Tensor) -> None:
    """y_q * scale is exact to half a step of e4m3, with a little for the norm's own arithmetic."""
    half_step = torch.maximum(exact.abs() * STEP / 2, scale * SMALLEST_STEP / 2)
    error = (y_q.double() * scale - exact).abs()
    assert bool((error <= half_step * (1 + 1e-3) + 1e-6 * exact.abs().max()).all())


@every_device
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("ndim", [1, 2])
def test_scale_per_row(name: str, dtype: torch.dtype, ndim: int, device: str) -> None:
    args = norm_args(f"{name}_quant", device, dtype, sizes=(11, 4, 67), ndim=ndim)
    y_q, scale, *rest = _quantize(name, args)
    assert y_q.dtype is torch.float8_e4m3fn and scale.dtype is torch.float32
    assert scale.shape == (11, 4, 67)[:-ndim]
    exact = _exact(name, args)
    dims = tuple(range(-ndim, 0))
    torch.testing.assert_close(scale.double(), exact.abs().amax(dims) / LARGEST, rtol=1e-5, atol=0)
    assert bool((y_q.float().abs().amax(dims) == LARGEST).all())
    _assert_rounded(y_q, scale.double().reshape(*scale.shape, *(1,) * ndim), exact)
    for got, want in zip(rest, _fwd(name, args)[1:], strict=True):
        assert torch.equal(got, want)


@every_device
@every_kind
def test_agrees_with_the_definition(name: str, device: str) -> None:
    args = norm_args(f"{name}_quant", device, torch.float32, sizes=(11, 67))
    for scale in (None, torch.tensor([0.02], device=device)):
        values = {**dict(zip(schema_of(f"{name}_quant"), args, strict=True)), "scale": scale}
        y_q, scales, *_ = _quantize(name, tuple(values.values()))
        want_q, want_scale = definitions.quantize(_fwd(name, args)[0], scale)
        assert torch.equal(y_q.float(), want_q.float())
        assert scales.numel() == (0 if scale is not None else 11)
        if scale is None:  # CUDA divides by a Python number through its reciprocal
            torch.testing.assert_close(scales, want_scale[:, 0], rtol=2e-7, atol=0)


@every_device
@every_kind
def test_given_scale_saturates(name: str, device: str) -> None:
    args = norm_args(f"{name}_quant", device, torch.float32, sizes=(11, 67), scale=2.0**-8)
    exact = _exact(name, args)
    y_q, scale, *_ = _quantize(name, args)
    assert scale.shape == (0,)
    inside = exact.abs() < LARGEST * 2**-8 * 0.999
    assert bool(inside.any()) and bool((~inside).any())
    got = y_q.double() * 2**-8
    _assert_rounded(y_q[inside], torch.tensor(2.0**-8, dtype=torch.float64), exact[inside])
    assert torch.equal(got[~inside], exact[~inside].sign() * LARGEST * 2**-8)


@every_device
@every_kind
def test_rows_of_zeros_and_nan(name: str, device: str) -> None:
    args = norm_args(f"{name}_quant", device, torch.float32, sizes=(6, 33), weight=False,
                     bias=False)  # fmt: skip
    clean = _quantize(name, args)
    n = 2 if name.startswith("add_") else 1
    for a in args[:n]:
        a[1] = 0.0
    args[0][4, 7] = float("nan")
    y_q, scale, *_ = _quantize(name, args)
    assert bool((y_q[1].float() == 0).all()) and bool(scale[1].isfinite()) and float(scale[1]) > 0
    assert bool(y_q[4].float().isnan().all()) and bool(scale[4].isnan())
    others = [0, 2, 3, 5]
    assert torch.equal(y_q[others].float(), clean[0][others].float())
    assert torch.equal(scale[others], clean[1][others])


@every_device
@every_kind
def test_bits_do_not_depend_on_the_number_of_rows(name: str, device: str) -> None:
    args = norm_args(f"{name}_quant", device, torch.bfloat16, sizes=(23, 40_001))
    n = 2 if name.startswith("add_") else 1
    whole = _quantize(name, args)
    for rows in (slice(7, 8), slice(3, 8)):
        part = _quantize(name, (*(a[rows] for a in args[:n]), *args[n:]))
        for a, b in zip(part, whole, strict=True):
            assert torch.equal(a.float(), b[rows].float())


@every_device
@every_kind
@pytest.mark.parametrize("sizes", [(0, 8), (3, 0), (0, 0), (1, 1), (8,)])
def test_any_sizes(name: str, sizes: tuple[int, ...], device: str) -> None:
    for scale in (None, 1.0):
        args = norm_args(f"{name}_quant", device, torch.float32, sizes=sizes, scale=scale)
        y_q, scales, *_ = _quantize(name, args)
        assert y_q.shape == sizes and scales.shape == (sizes[:-1] if scale is None else (0,))


@every_kind
def test_not_differentiable(name: str) -> None:
    x, *rest = norm_args(f"{name}_quant", "cpu", torch.float32)
    y_q = _quantize(name, (x.requires_grad_(), *rest))[0]
    with pytest.raises(RuntimeError, match=f"ikbo.{name}_quant: rounding to fp8 has no deriv"):
        y_q.float().sum().backward()


@every_kind
def test_python_functions_and_messages(name: str) -> None:
    args = norm_args(f"{name}_quant", "cpu", torch.float32)
    for a, b in zip(getattr(ikbo, f"{name}_quant")(*args), _quantize(name, args), strict=True):
        assert torch.equal(a.float(), b.float())
    given = dict(zip(schema_of(f"{name}_quant"), args, strict=True))
    for scale in (torch.ones(2), torch.ones(1, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match=f"ikbo.{name}_quant: expected scale of one element"):
            getattr(ikbo, f"{name}_quant")(**{**given, "scale": scale})
    x = Maker("cpu", torch.float32)(4, 8)
    with pytest.raises(RuntimeError, match=f"ikbo.{name}_quant: expected weight in the shape of"):
        _quantize(name, tuple({**given, "weight": x}.values()))
