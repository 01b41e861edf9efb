"""gated_mlp (GeGLU) against torch's linear layers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cases import Case, Draw, Maker, compiled


def cases(scaled: Callable[[int], int]) -> list[Case]:
    def case(tokens: int, dim: int, hidden: int) -> Case:
        t, d, h = scaled(tokens), scaled(dim), scaled(hidden)

        def inputs(draw: Draw) -> SimpleNamespace:
            return SimpleNamespace(
                x=draw.randn(t, d), w_gate=draw.randn(h, d) / d**0.5,
                w_up=draw.randn(h, d) / d**0.5, w_down=draw.randn(d, h) / h**0.5,
            )  # fmt: skip

        contestants = {
            "ikbo": _ikbo,
            "compile": _call(lambda *args: compiled(_geglu)(*args)),
            "eager": _call(_geglu),
        }
        return Case(f"{tokens}x{dim}x{hidden}", inputs, contestants)

    return [
        case(8192, 4096, 11008),
        case(8192, 768, 3072),
        case(16384, 2048, 8192),
        case(64, 4096, 11008),
        case(16, 4096, 11008),
        case(1, 4096, 11008),
    ]


def _ikbo(i: Any) -> Callable[[], Tensor]:
    return lambda: torch.ops.ikbo.gated_mlp(
        i.x, i.w_gate, i.w_up, None, None, i.w_down, None, "gelu_tanh"
    )


def _geglu(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    gate = F.gelu(F.linear(x, w_gate), approximate="tanh")
    return F.linear(gate * F.linear(x, w_up), w_down)


def _call(function: Callable[..., Tensor]) -> Maker:
    return lambda i: lambda: function(i.x, i.w_gate, i.w_up, i.w_down)
