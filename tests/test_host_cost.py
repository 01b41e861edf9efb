"""What calling an op costs on the host, next to torch.add."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import ikbo  # noqa: F401


def microseconds(*calls: Callable[[], Any]) -> list[float]:
    """The fastest of many batches of each call, taking turns: what it costs undisturbed."""
    fastest = [float("inf")] * len(calls)
    for _ in range(60):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(500):
                call()
            fastest[i] = min(fastest[i], time.perf_counter() - start)
    return [seconds / 500 * 1e6 for seconds in fastest]


def test_a_raw_op_costs_at_most_three_torch_adds() -> None:
    users, row = torch.tensor([0, 1, 1, 0], dtype=torch.int32), torch.randn(4)
    no_rows = torch.empty(0, 64)
    ops = torch.ops.ikbo
    with torch.inference_mode():
        add, group, norm = microseconds(
            lambda: torch.add(row, row),
            lambda: ops.group_candidates.default(users, 2),
            lambda: ops.rms_norm.default(no_rows),
        )
    assert norm <= 3 * add, f"rms_norm {norm:.2f} us, torch.add {add:.2f} us"
    # Two results in a tuple, and the sort itself.
    assert group <= 4 * add, f"group_candidates {group:.2f} us, torch.add {add:.2f} us"
