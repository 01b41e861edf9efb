"""Definitions of the gated linear unit, its MLP, and a Linear with its activation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .linear import ACTIVATIONS


def gated_linear(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """act(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)."""
    return ACTIVATIONS[activation](F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)


def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """F.linear(gated_linear(x, ...), w_down, b_down)."""
    hidden = gated_linear(x, w_gate, w_up, b_gate, b_up, activation)
    return F.linear(hidden, w_down, b_down)


def linear_act(x: Tensor, w: Tensor, b: Tensor | None = None, activation: str = "none") -> Tensor:
    """act(F.linear(x, w, b))."""
    return ACTIVATIONS[activation](F.linear(x, w, b))
