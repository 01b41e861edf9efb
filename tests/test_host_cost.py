"""What calling an op costs on the host, next to torch.add."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import ikbo  # noqa: F401


def microseconds(f: Callable[..., Any], *args: Any) -> float:
    """The fastest of several batches of calls: what the call costs when nothing interferes."""
    for _ in range(2000):
        f(*args)
    fastest = float("inf")
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(2000):
            f(*args)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest / 2000 * 1e6


def test_a_raw_op_costs_at_most_three_torch_adds() -> None:
    users, row = torch.tensor([0, 1, 1, 0], dtype=torch.int32), torch.randn(4)
    with torch.inference_mode():
        add = microseconds(torch.add, row, row)
        group = microseconds(torch.ops.ikbo.group_candidates.default, users, 2)
    assert group <= 3 * add, f"group_candidates {group:.2f} us, torch.add {add:.2f} us"
