"""What the library did and why: explain, counters, strict mode, warm-up, SM limit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from ._library import library


def explain(op: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Runs an op once and says which path it took, why, and what was launched.

    Args:
        op: its name, e.g. ``"linear_compression"`` or ``"rms_norm_bwd"``.
        *args, **kwargs: the arguments of ``torch.ops.ikbo.NAME``.

    Returns:
        ``{"op", "path", "reason"}`` and, where a kernel ran, ``"config"``. Path ``sm90`` is a
        Hopper kernel, ``library`` products of torch's libraries where those are meant to do the
        work (backward passes), ``cpu`` the implementation for CPU tensors, ``reference`` the slow
        path on a GPU; ``reason`` says why it is not a kernel.

    Raises:
        AttributeError: there is no such op.
    """
    with torch.no_grad():
        getattr(torch.ops.ikbo, op)(*args, **kwargs)
    record: dict[str, Any] = json.loads(library().ikbo_explain(op.encode()))
    return record


def counters() -> dict[tuple[str, str], int]:
    """Calls per (op, path) since the library was loaded or :func:`reset_counters`."""
    totals: dict[tuple[str, str], int] = {}
    for row in json.loads(library().ikbo_counters()):
        key = (row["op"], row["path"])
        totals[key] = totals.get(key, 0) + row["count"]
    return {key: count for key, count in totals.items() if count}


def reset_counters() -> None:
    """Sets every counter to zero."""
    library().ikbo_counters_reset()


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Within this context, a call that would take the slow path on a GPU raises instead.

    Process-wide, so that backward passes (which run on threads of their own) are covered.
    """
    library().ikbo_set_strict(1)
    try:
        yield
    finally:
        library().ikbo_set_strict(0)


def warmup(device: torch.device | str | int | None = None) -> None:
    """Loads every kernel onto a GPU, so that neither a first request nor a graph capture has to.

    Args:
        device: a CUDA device; by default the current one.

    Raises:
        RuntimeError: the device is no CUDA device, or CUDA reports an error.
    """
    if isinstance(device, int):
        device = torch.device("cuda", device)
    chosen = torch.device("cuda" if device is None else device)
    if chosen.type != "cuda":
        raise RuntimeError(f"ikbo.warmup: expected a CUDA device, got {chosen}.")
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    error = library().ikbo_warmup(index)
    if error is not None:
        raise RuntimeError(f"ikbo.warmup: {error.decode()}")


@contextlib.contextmanager
def sm_limit(sms: int) -> Iterator[None]:
    """Within this context, persistent kernels fill at most ``sms`` SMs (process-wide).

    Leaves room for work on other streams. Results don't depend on it, but for the order of sums in
    linear_compression.

    Raises:
        ValueError: ``sms`` is below 1.
    """
    if sms < 1:
        raise ValueError(f"ikbo.sm_limit: expected at least 1 SM, got {sms}.")
    before = library().ikbo_sm_limit()
    library().ikbo_set_sm_limit(sms)
    try:
        yield
    finally:
        library().ikbo_set_sm_limit(before)
