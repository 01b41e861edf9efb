"""Comparing a rewritten program with its original on live calls."""

from __future__ import annotations

import dataclasses
import random
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Program = Callable[..., Any]


@dataclasses.dataclass
class ShadowStatistics:
    """What was seen so far.

    Attributes:
        calls, compared: how many in all, and how many on which both programs ran.
        largest_difference: between results of the two where both are finite.
        top_k_overlap: the mean share of the first result's ``top_k`` rows that the two agree on.
        nonfinite_original, nonfinite_rewritten: NaN and infinite elements of results compared.
        errors: calls on which the rewritten program raised.
        fell_back: why the original serves, if it does; else empty.
    """

    calls: int = 0
    compared: int = 0
    largest_difference: float = 0.0
    top_k_overlap: float = 1.0
    nonfinite_original: int = 0
    nonfinite_rewritten: int = 0
    errors: int = 0
    fell_back: str = ""


class Shadow:
    """Serves the rewritten program and compares a sample of the calls; see :func:`ikbo.shadow`.

    Attributes:
        statistics: a :class:`ShadowStatistics`.
    """

    def __init__(
        self,
        original: Program,
        rewritten: Program,
        fraction: float,
        tolerance: float | None,
        top_k: int,
        seed: int | None,
    ) -> None:
        self.statistics = ShadowStatistics()
        self._original, self._rewritten = original, rewritten
        self._fraction, self._tolerance, self._top_k = fraction, tolerance, top_k
        self._draw, self._lock = random.Random(seed), threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.statistics.calls += 1
            compares = self._draw.random() < self._fraction
            original_serves = bool(self.statistics.fell_back)
        if original_serves:
            return self._original(*args, **kwargs)
        try:
            new = self._rewritten(*args, **kwargs)
        except Exception as error:
            if self._tolerance is None:
                raise
            with self._lock:
                self.statistics.errors += 1
            self._fall_back(f"the rewritten program raised {type(error).__name__}: {error}")
            return self._original(*args, **kwargs)
        if not compares:
            return new
        old = self._original(*args, **kwargs)
        return old if self._differs(old, new) else new

    def reset(self) -> None:
        """Forgets the statistics and serves the rewritten program again."""
        with self._lock:
            self.statistics = ShadowStatistics()

    def _differs(self, old: Any, new: Any) -> bool:
        """Notes the differences; whether the original is to be served."""
        difference, overlap, bad, elsewhere = 0.0, 1.0, [0, 0], False
        pairs = list(zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True))
        for i, (a, b) in enumerate(pairs):
            if not isinstance(a, Tensor) or not a.numel():
                continue
            a, b = a.detach().double(), b.detach().double()
            finite = torch.isfinite(a) & torch.isfinite(b)
            elsewhere = elsewhere or not torch.equal(torch.isfinite(a), torch.isfinite(b))
            for side, t in enumerate((a, b)):
                bad[side] += int((~torch.isfinite(t)).sum())
            if finite.any():
                difference = max(difference, float((a - b)[finite].abs().max()))
            if i == 0 and a.dim():
                overlap = _overlap(a, b, self._top_k)
        with self._lock:
            s = self.statistics
            s.compared += 1
            s.largest_difference = max(s.largest_difference, difference)
            s.top_k_overlap += (overlap - s.top_k_overlap) / s.compared
            s.nonfinite_original += bad[0]
            s.nonfinite_rewritten += bad[1]
        if self._tolerance is None:
            return False
        if elsewhere:
            self._fall_back(f"NaN or infinite: {bad[1]} results, {bad[0]} others of the original's")
        elif difference > self._tolerance:
            self._fall_back(f"results differ by {difference:.3g} > {self._tolerance:.3g}")
        else:
            return False
        return True

    def _fall_back(self, why: str) -> None:
        with self._lock:
            first = not self.statistics.fell_back
            self.statistics.fell_back = self.statistics.fell_back or why
        if first:
            warnings.warn(f"ikbo.shadow: the original serves from here on: {why}", stacklevel=3)


def _overlap(a: Tensor, b: Tensor, k: int) -> float:
    """The share of the k largest that both have; of rows by their first element."""
    if a.dim() > 1:
        a, b = (t.flatten(1)[:, 0] for t in (a, b))
    k = min(k, a.shape[0])
    best = [set(t.nan_to_num(nan=float("-inf")).topk(k).indices.tolist()) for t in (a, b)]
    return len(best[0] & best[1]) / k


def shadow(
    original: Program | ExportedProgram,
    rewritten: Program | ExportedProgram,
    fraction: float,
    *,
    tolerance: float | None = None,
    top_k: int = 10,
    seed: int | None = None,
) -> Shadow:
    """A callable that serves ``rewritten`` and, on a sample of the calls, runs ``original`` too.

    Args:
        original, rewritten: programs or callables that take the same arguments: modules, exported
            programs, AOTInductor packages.
        fraction: of the calls to compare, 0 to 1. Comparing waits for the device.
        tolerance: the largest absolute difference to accept. Past it, or where only one program's
            result is NaN or infinite, or the rewritten one raises, the original's
            result is returned, for this call and from then on, with a warning. None: only compare.
        top_k: of how many best rows of the first result to compare the ranking.
        seed: of the sample.

    Raises:
        ValueError: ``fraction`` is not between 0 and 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"ikbo.shadow: expected a fraction between 0 and 1, got {fraction}.")
    from torch.export import ExportedProgram  # late: it takes long to import

    old, new = (p.module() if isinstance(p, ExportedProgram) else p for p in (original, rewritten))
    return Shadow(old, new, fraction, tolerance, top_k, seed)
