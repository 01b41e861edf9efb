"""group_candidates against torch's stable sort and a search for the offsets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..cases import Case, Draw


def cases(scaled: Callable[[int], int]) -> list[Case]:
    def case(batch: int, n_users: int) -> Case:
        def inputs(draw: Draw) -> SimpleNamespace:
            users = scaled(n_users)
            cand_to_user = draw.integers(0, users, scaled(batch)).to(draw.device)
            return SimpleNamespace(cand_to_user=cand_to_user, n_users=users)

        contestants = {"ikbo": _ikbo, "torch_sort": _torch_sort}
        return Case(f"B{batch}_U{n_users}", inputs, contestants, ("int32",))

    sizes = [(200, 1), (2048, 32), (16384, 256), (100000, 2000), (1000000, 20000)]
    return [case(*size) for size in sizes]


def _ikbo(i: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: torch.ops.ikbo.group_candidates(i.cand_to_user, i.n_users)


def _torch_sort(i: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    each = torch.arange(i.n_users + 1, dtype=torch.int32, device=i.cand_to_user.device)

    def run() -> tuple[Tensor, Tensor]:
        users, order = torch.sort(i.cand_to_user, stable=True)
        return order, torch.searchsorted(users, each)

    return run
