"""rms_norm and layer_norm, forward and backward, against torch and a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cases import DTYPES, Case, Draw, compiled
from ..device_tests import copies

NOTE = (
    "`copy` is the fastest of five forms of a plain copy kernel (tests/device/copy.cu) that moves "
    "as many bytes as x, y, gradients and residuals have. 16384x4096 and 4096x131072 are fp32. All "
    "are timed as graph replays over rotating tensors, and include the whole weight gradients."
)
EPS = 1e-6
BOTH, FORWARD, BACKWARD = ("fwd", "bwd"), ("fwd",), ("bwd",)
SHAPES = [
    (32768, 4096, BOTH), (32768, 1024, BOTH),
    (8, 8192, BOTH), (128, 4096, BOTH), (1024, 1024, FORWARD),
    (131072, 128, BOTH), (32768, 256, BOTH), (32768, 384, BOTH), (32768, 512, BOTH),
    (32768, 640, FORWARD), (32768, 768, BOTH), (32768, 2048, BOTH), (32768, 8192, BOTH),
    (1024, 12288, BACKWARD), (32768, 16384, BOTH), (32768, 32768, BOTH), (16384, 65536, BOTH),
    (8192, 131072, BOTH), (4096, 262144, BOTH),
    (522240, 257, BOTH), (174592, 769, BOTH), (32768, 4095, BOTH),
]  # fmt: skip
FP32_SHAPES = [(16384, 4096, BOTH), (4096, 131072, BOTH)]
FP16_SHAPES = SHAPES[:2]  # fp16 moves the same bytes
# Forwards with more operands or fewer bytes: the tensors of two bytes an element that they move.
OTHERS = [("add_rms", 4), ("fp8_rms", 1.5), ("fp8_ln", 1.5)]
OTHER_SHAPE = (32768, 4096)


def cases(scaled: Callable[[int], int]) -> list[Case]:
    def case(
        kind: str, direction: str, M: int, N: int, dtypes: tuple[str, ...], tensors: float
    ) -> Case:
        m, n = scaled(M), scaled(N)

        def inputs(draw: Draw) -> SimpleNamespace:
            i = SimpleNamespace(x=draw.randn(m, n), weight=draw.randn(n), bias=None)
            if kind.endswith("ln"):
                i.bias = draw.randn(n)
            if kind.startswith("add"):
                i.residual = draw.randn(m, n)
            if direction == "bwd":
                i.grad = draw.randn(m, n)
            return i

        moved = int(tensors * m * n * DTYPES[dtypes[0]].itemsize)
        copy = copies(moved, reads=2 if direction == "bwd" else 1)
        contestants = CONTESTANTS[kind, direction] | {"copy": copy}
        name = f"{kind}_{direction}_{M}x{N}"
        return Case(name, inputs, contestants, dtypes, by_graphs=True)

    result = []
    for shape in SHAPES + FP32_SHAPES:
        M, N, directions = shape
        dtypes: tuple[str, ...] = ("bf16",)
        if shape in FP16_SHAPES:
            dtypes = ("bf16", "fp16")
        elif shape in FP32_SHAPES:
            dtypes = ("fp32",)
        for kind in ("rms", "ln"):
            for direction in directions:
                tensors = 2 if direction == "fwd" else 3
                result.append(case(kind, direction, M, N, dtypes, tensors))
    return result + [case(kind, "fwd", *OTHER_SHAPE, ("bf16",), t) for kind, t in OTHERS]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _ln(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms(total, weight), total


def _fp8_rms(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _fp8(_rms(x.float(), weight.float()))


def _fp8_ln(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return _fp8(_ln(x.float(), weight.float(), bias.float()))


def _fp8(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = y.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (y * scale.reciprocal()).to(torch.float8_e4m3fn), scale.squeeze(-1)


def _rms_statistics(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)


def _ln_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
    return mean, torch.rsqrt(variance + EPS)


def _rms_bwd(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    normalised, g = x.float() * rstd, grad.float()
    gw = g * weight.float()
    dx = rstd * (gw - normalised * (gw * normalised).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g * normalised).sum(0).to(weight.dtype)


def _ln_bwd(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    normalised, g = (x.float() - mean) * rstd, grad.float()
    gw = g * weight.float()
    inner = gw.mean(-1, keepdim=True) + normalised * (gw * normalised).mean(-1, keepdim=True)
    dweight, dbias = (g * normalised).sum(0), g.sum(0)
    return (rstd * (gw - inner)).to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


def _ikbo_rms_bwd(i: Any) -> Callable[[], list[Tensor]]:
    _, rstd = torch.ops.ikbo.rms_norm_fwd(i.x, i.weight, None, EPS)
    return lambda: torch.ops.ikbo.rms_norm_bwd(i.grad, i.x, i.weight, None, rstd, 0.0, 1, 0b11)[:2]


def _ikbo_ln_bwd(i: Any) -> Callable[[], list[Tensor]]:
    _, mean, rstd = torch.ops.ikbo.layer_norm_fwd(i.x, i.weight, i.bias, EPS)
    return lambda: torch.ops.ikbo.layer_norm_bwd(
        i.grad, i.x, i.weight, i.bias, mean, rstd, 0.0, 1, 0b111
    )


# Eager's backward is called as the op that autograd calls: a graph can't capture autograd alone.
def _eager_rms_bwd(i: Any) -> Callable[[], tuple[Tensor, ...]]:
    rstd, backward = _rms_statistics(i.x), torch.ops.aten._fused_rms_norm_backward
    return lambda: backward(i.grad, i.x, i.weight.shape, rstd, i.weight, [True] * 2)


def _eager_ln_bwd(i: Any) -> Callable[[], tuple[Tensor, ...]]:
    mean, rstd = _ln_statistics(i.x)
    backward = torch.ops.aten.native_layer_norm_backward
    return lambda: backward(i.grad, i.x, i.weight.shape, mean, rstd, i.weight, i.bias, [True] * 3)


def _compiled_rms_bwd(i: Any) -> Callable[[], tuple[Tensor, ...]]:
    rstd = _rms_statistics(i.x)
    return lambda: compiled(_rms_bwd)(i.grad, i.x, i.weight, rstd)


def _compiled_ln_bwd(i: Any) -> Callable[[], tuple[Tensor, ...]]:
    mean, rstd = _ln_statistics(i.x)
    return lambda: compiled(_ln_bwd)(i.grad, i.x, i.weight, mean, rstd)


CONTESTANTS: dict[tuple[str, str], dict[str, Any]] = {
    ("rms", "fwd"): {
        "ikbo": lambda i: lambda: torch.ops.ikbo.rms_norm(i.x, i.weight, None, EPS),
        "compile": lambda i: lambda: compiled(_rms)(i.x, i.weight),
        "eager": lambda i: lambda: _rms(i.x, i.weight),
    },
    ("ln", "fwd"): {
        "ikbo": lambda i: lambda: torch.ops.ikbo.layer_norm(i.x, i.weight, i.bias, EPS),
        "compile": lambda i: lambda: compiled(_ln)(i.x, i.weight, i.bias),
        "eager": lambda i: lambda: _ln(i.x, i.weight, i.bias),
    },
    ("add_rms", "fwd"): {
        "ikbo": lambda i: lambda: torch.ops.ikbo.add_rms_norm(i.x, i.residual, i.weight, None, EPS),
        "compile": lambda i: lambda: compiled(_add_rms)(i.x, i.residual, i.weight),
        "eager": lambda i: lambda: _add_rms(i.x, i.residual, i.weight),
    },
    ("fp8_rms", "fwd"): {
        "ikbo": lambda i: lambda: torch.ops.ikbo.rms_norm_quant(i.x, i.weight, None, None, EPS)[:2],
        "compile": lambda i: lambda: compiled(_fp8_rms)(i.x, i.weight),
        "eager": lambda i: lambda: _fp8_rms(i.x, i.weight),
    },
    ("fp8_ln", "fwd"): {
        "ikbo": lambda i: lambda: torch.ops.ikbo.layer_norm_quant(
            i.x, i.weight, i.bias, None, EPS
        )[:2],
        "compile": lambda i: lambda: compiled(_fp8_ln)(i.x, i.weight, i.bias),
        "eager": lambda i: lambda: _fp8_ln(i.x, i.weight, i.bias),
    },
    ("rms", "bwd"): {
        "ikbo": _ikbo_rms_bwd, "compile": _compiled_rms_bwd, "eager": _eager_rms_bwd,
    },
    ("ln", "bwd"): {
        "ikbo": _ikbo_ln_bwd, "compile": _compiled_ln_bwd, "eager": _eager_ln_bwd,
    },
}  # fmt: skip
