"""The gated MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ._common import check_activation


class GatedMLP(nn.Module):
    """``down_proj(act(gate_proj(x)) * up_proj(x))`` by :func:`ikbo.gated_mlp`.

    The three Linears hold the parameters, under the names that common language models use; they
    are not called, so hooks on them don't run.

    Args:
        dim: K, features of the input.
        hidden: N, features between.
        out: features of the result; ``dim`` by default.
        activation: none, relu, relu2, silu, gelu, gelu_tanh or sigmoid.
        bias: whether the Linears have biases.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        out: int | None = None,
        activation: str = "silu",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = check_activation("GatedMLP", activation)
        self.gate_proj = nn.Linear(dim, hidden, bias, device, dtype)
        self.up_proj = nn.Linear(dim, hidden, bias, device, dtype)
        self.down_proj = nn.Linear(hidden, dim if out is None else out, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., dim]`` -> ``[..., out]``."""
        return ops.gated_mlp(
            x,
            self.gate_proj.weight,
            self.up_proj.weight,
            self.gate_proj.bias,
            self.up_proj.bias,
            self.down_proj.weight,
            self.down_proj.bias,
            self.activation,
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
