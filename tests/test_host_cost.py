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
    """Ops on an empty batch: dispatch, checks and allocation, without the work. (A stable-ABI op of
    six tensors that does nothing at all costs two.)"""
    ops, no_users = torch.ops.ikbo, torch.empty(0, dtype=torch.int32)
    row, x, e = torch.randn(4), torch.empty(0, 4), torch.empty(0, 4, 8)
    w, e_user, q, k = (torch.randn(s) for s in ((4, 4), (3, 4, 8), (0, 1, 2, 8), (3, 5, 2, 8)))
    calls = {
        "rms_norm": lambda: ops.rms_norm.default(x),
        "group_candidates": lambda: ops.group_candidates.default(no_users, 2),
        "linear_act": lambda: ops.linear_act.default(x, w),
        "gated_linear": lambda: ops.gated_linear.default(x, w, w),
        "gated_mlp": lambda: ops.gated_mlp.default(x, w, w, None, None, w),
        "linear_compression": lambda: ops.linear_compression.default(
            e, e_user, w, w, None, no_users
        ),
        "concat_linear": lambda: ops.concat_linear.default(x, w, w, w, None, no_users),
        "candidate_attention": lambda: ops.candidate_attention.default(
            q, k, k, None, None, no_users
        ),
    }
    with torch.inference_mode():
        add, *costs = microseconds(lambda: torch.add(row, row), *calls.values())
    ratios = {name: cost / add for name, cost in zip(calls, costs, strict=True)}
    # 3 is what they keep to; a tenth more is for what else the machine does.
    assert max(ratios.values()) <= 3.3, {name: f"{r:.2f}" for name, r in ratios.items()}
