"""gated_mlp (GeGLU) against torch's linear layers: forward, few tokens, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cases import Case, Draw, Maker, compiled
from ..ceilings import same_size_copies

NOTE = (
    "`copy` moves as many bytes as the three weights have: what few tokens can't be quicker than. "
    "`_train` cases are a forward and a backward with gradients of all four operands."
)
FEW_TOKENS = 64  # at most: reading the weights is the work


def cases(scaled: Callable[[int], int]) -> list[Case]:
    def case(tokens: int, dim: int, hidden: int, *, trains: bool = False) -> Case:
        t, d, h = scaled(tokens), scaled(dim), scaled(hidden)

        def inputs(draw: Draw) -> SimpleNamespace:
            i = SimpleNamespace(
                x=draw.randn(t, d), w_gate=draw.randn(h, d) / d**0.5,
                w_up=draw.randn(h, d) / d**0.5, w_down=draw.randn(d, h) / h**0.5,
            )  # fmt: skip
            if trains:
                i.grad = draw.randn(t, d)
            return i

        make = _train if trains else _call
        contestants = {
            "ikbo": make(_ikbo),
            "compile": make(lambda *args: compiled(_geglu)(*args)),
            "eager": make(_geglu),
        }
        if tokens <= FEW_TOKENS:
            contestants["copy"] = same_size_copies(3 * d * h * 2)
        name = f"{tokens}x{dim}x{hidden}"
        return Case(f"{name}_train" if trains else name, inputs, contestants)

    return [
        case(8192, 4096, 11008),
        case(8192, 768, 3072),
        case(16384, 2048, 8192),
        case(64, 4096, 11008),
        case(16, 4096, 11008),
        case(1, 4096, 11008),
        case(8192, 768, 3072, trains=True),
        case(8192, 4096, 11008, trains=True),
    ]


def _ikbo(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    out: Tensor = torch.ops.ikbo.gated_mlp(x, w_gate, w_up, None, None, w_down, None, "gelu_tanh")
    return out


def _geglu(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    gate = F.gelu(F.linear(x, w_gate), approximate="tanh")
    return F.linear(gate * F.linear(x, w_up), w_down)


def _call(function: Callable[..., Tensor]) -> Maker:
    return lambda i: lambda: function(i.x, i.w_gate, i.w_up, i.w_down)


def _train(function: Callable[..., Tensor]) -> Maker:
    def make(i: Any) -> Callable[[], tuple[Tensor, ...]]:
        # Tensors made in inference mode have no place in autograd.
        with torch.inference_mode(False):
            grad, *leaves = (t.clone() for t in (i.grad, i.x, i.w_gate, i.w_up, i.w_down))
            for leaf in leaves:
                leaf.requires_grad_()

        def run() -> tuple[Tensor, ...]:
            with torch.inference_mode(False), torch.enable_grad():
                return torch.autograd.grad(function(*leaves), leaves, grad)

        return run

    return make
