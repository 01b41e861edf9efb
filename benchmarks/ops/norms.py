"""rms_norm and layer_norm, forward and backward, against torch and a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cases import Case, Draw, compiled
from ..ceilings import same_size_copies

EPS = 1e-6
SHAPES = [
    (32768, 4096), (32768, 1024), (128, 4096), (8, 8192), (32768, 256), (32768, 384), (32768, 512),
    (32768, 2048), (32768, 8192), (32768, 16384), (32768, 32768), (16384, 65536), (8192, 131072),
    (4096, 262144),
]  # fmt: skip
FP16_SHAPES = SHAPES[:2]  # fp16 moves the same bytes


def cases(scaled: Callable[[int], int]) -> list[Case]:
    def case(kind: str, direction: str, M: int, N: int) -> Case:
        m, n = scaled(M), scaled(N)

        def inputs(draw: Draw) -> SimpleNamespace:
            i = SimpleNamespace(x=draw.randn(m, n), weight=draw.randn(n), bias=None)
            if kind == "ln":
                i.bias = draw.randn(n)
            if direction == "bwd":
                i.grad = draw.randn(m, n)
            return i

        moved = (2 if direction == "fwd" else 3) * m * n * 2
        contestants = CONTESTANTS[kind, direction] | {"copy": same_size_copies(moved)}
        dtypes = ("bf16", "fp16") if (M, N) in FP16_SHAPES else ("bf16",)
        return Case(f"{kind}_{direction}_{M}x{N}", inputs, contestants, dtypes)

    kinds = [("rms", "fwd"), ("rms", "bwd"), ("ln", "fwd"), ("ln", "bwd")]
    return [case(*kind, M, N) for M, N in SHAPES for kind in kinds]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _ln(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


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
    ("rms", "bwd"): {
        "ikbo": _ikbo_rms_bwd, "compile": _compiled_rms_bwd, "eager": _eager_rms_bwd,
    },
    ("ln", "bwd"): {
        "ikbo": _ikbo_ln_bwd, "compile": _compiled_ln_bwd, "eager": _eager_ln_bwd,
    },
}  # fmt: skip
