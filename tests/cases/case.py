"""One way of calling an op, shared by every contract test (opcheck, compile, export, ...)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """`make(device, dtype)` returns the positional arguments of torch.ops.ikbo.OP, seeded."""

    op: str
    label: str
    make: Callable[[str, torch.dtype], tuple[Any, ...]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    has_fwd: bool = True  # whether OP_fwd exists with the same arguments
    has_out: bool = False  # whether OP.out exists
    all_results_differentiable: bool = True  # else a gradient into some result of OP_fwd raises

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


class Maker:
    """Seeded random tensors on a device."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *sizes: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*sizes, generator=self.generator, dtype=torch.float64) * scale
        return values.to(self.device, dtype or self.dtype)

    def map(self, n_candidates: int, n_users: int, *, rows_without_user: bool = True) -> Tensor:
        """A shuffled map, with a padding row where there is room. (Rows out of range are NaN, which
        opcheck takes for a difference: they have tests of their own.)"""
        index = torch.randint(max(n_users, 1), (n_candidates,), generator=self.generator)
        if n_users == 0:
            index.fill_(-1)
        elif rows_without_user and n_candidates > 4:
            index[n_candidates // 2] = -1
        return index.to(self.device, torch.int32)
