"""How contestants are timed.

The GPU's clocks follow its power and temperature, so contestants take turns for several rounds and
what counts is the median of per-round ratios. Work under 100 us is timed as CUDA-graph replays over
sets of inputs that together exceed the L2 cache, all contestants of a case alike; longer work by
events around one call, unless the case asks for graphs. Before each sample the L2 cache is filled
with clean lines of another tensor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .cases import DTYPES, Case, Draw, Maker, reset_compiler

ROUNDS = 11
SLOW_US, SLOW_ROUNDS = 50_000, 3  # who takes longer than SLOW_US sits out after SLOW_ROUNDS
GRAPH_BELOW_US = 100
ROTATING_BYTES, MAX_SETS = 200_000_000, 64
ROUND_US = 20_000  # one contestant's graph replay at most, where it holds more than one call
MAX_RELERR = 2e-2

Call = Callable[[], Any]
Sample = Callable[[], float]  # microseconds of one call
Row = dict[str, Any]


class Timer(Protocol):
    """Ways to time calls on one device."""

    def events(self, call: Call, repeats: int) -> Sample:
        """Each sample is the median of ``repeats`` timed calls."""

    def graph(self, calls: Sequence[Call], repeats: int) -> Sample:
        """Each sample is the median of ``repeats`` replays of all calls, per call."""

    def capturable(self, call: Call) -> bool:
        """Whether the call can go into a graph."""


class CudaTimer:
    """Times on the current CUDA device."""

    def __init__(self) -> None:
        self._flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")

    def _timed(self, launch: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Leaves nothing of use in the L2 cache, and the host gets ahead of the GPU meanwhile. The
        # reading is for who reads only: lines that wait to be written, up to 50 MB, would have him
        # pay for the flush (7 us of 76 for a gated MLP of 16 tokens).
        self._flush.zero_()
        self._flush.amax()
        start.record()
        launch()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end) * 1e3)

    def events(self, call: Call, repeats: int) -> Sample:
        return lambda: statistics.median(self._timed(call) for _ in range(repeats))

    def graph(self, calls: Sequence[Call], repeats: int) -> Sample:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # Results kept until the end don't share memory, so writes rotate too.
            results = [call() for call in calls]
        del results
        self._timed(graph.replay)
        return lambda: (
            statistics.median(self._timed(graph.replay) for _ in range(repeats)) / len(calls)
        )

    def capturable(self, call: Call) -> bool:
        # A capture that fails leaves torch's state broken, so waits are looked for beforehand.
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError:
            return False
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return True


class Contestant(NamedTuple):
    maker: Maker
    call: Call
    us: float  # estimate


def measure(
    case: Case, dtype: str, device: torch.device, timer: Timer, rounds: int = ROUNDS
) -> list[Row]:
    """Times a case's contestants; one row each, ``ikbo`` first.

    Who fails, or disagrees with ``ikbo``, gets a row with ``error`` and no times.
    """
    reset_compiler()
    rows: dict[str, Row] = {
        impl: {"case": case.name, "dtype": dtype, "impl": impl} for impl in case.contestants
    }

    def fail(impl: str, error: Exception) -> None:
        rows[impl]["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]

    with torch.inference_mode():
        try:
            inputs = case.inputs(Draw(device, DTYPES[dtype]))
        except Exception as error:
            for impl in rows:
                fail(impl, error)
            return list(rows.values())
        running: dict[str, Contestant] = {}
        expected = result = None
        for impl, makers in case.contestants.items():
            try:
                running[impl], result = _enter(makers, inputs, timer)
                if impl == "ikbo":
                    expected = result
                elif expected is not None and result is not None:
                    rows[impl]["relerr"] = relerr = relative_error(result, expected)
                    if not relerr < MAX_RELERR:
                        del running[impl]
                        raise ValueError(f"the result differs from ikbo's by {relerr:.2g}")
            except Exception as error:
                fail(impl, error)
        set_bytes = _bytes(vars(inputs)) + _bytes(expected)
        del expected, result
        try:
            samples, how = _rounds(case, dtype, device, running, inputs, set_bytes, timer, rounds)
        except Exception as error:
            for impl in running:
                fail(impl, error)
        else:
            for impl, times in samples.items():
                rows[impl] |= {
                    "us": round(statistics.median(times), 3),
                    "samples": [round(t, 3) for t in times],
                    "timing": how,
                }
                if impl != "ikbo" and "ikbo" in samples:
                    rows[impl]["ratio"] = round(ratio(times, samples["ikbo"]), 4)
    return list(rows.values())


def _enter(makers: Maker | Sequence[Maker], inputs: Any, timer: Timer) -> tuple[Contestant, Any]:
    """The quickest of a contestant's makers, and its result on the inputs."""
    best: Contestant | None = None
    makers = makers if isinstance(makers, Sequence) else [makers]
    repeats = 3 if len(makers) == 1 else 15  # forms of a copy differ by a few percent
    for maker in makers:
        call = maker(inputs)
        result = call()
        us = timer.events(call, 1)()
        if us < SLOW_US:
            us = timer.events(call, repeats)()
        if best is None or us < best.us:
            best, best_result = Contestant(maker, call, us), result
    assert best is not None
    return best, best_result


def _rounds(
    case: Case, dtype: str, device: torch.device, running: dict[str, Contestant], inputs: Any,
    set_bytes: int, timer: Timer, rounds: int,
) -> tuple[dict[str, list[float]], str]:  # fmt: skip
    if not running:
        return {}, ""
    quickest = min(c.us for c in running.values())
    short = case.by_graphs or quickest < GRAPH_BELOW_US
    graphs = short and all(timer.capturable(c.call) for c in running.values())
    samplers: dict[str, Sample] = {}
    if graphs:
        count = max(2, min(MAX_SETS, ROTATING_BYTES // max(set_bytes, 1) + 1))
        sets = [inputs, *(case.inputs(Draw(device, DTYPES[dtype], s)) for s in range(1, count))]
        for impl, c in running.items():
            calls = [c.maker(s) for s in sets[: max(1, int(ROUND_US / c.us))]]
            samplers[impl] = timer.graph(calls, 3)
    else:
        for impl, c in running.items():
            samplers[impl] = timer.events(c.call, max(1, min(5, int(ROUND_US / 5 / c.us))))
    turns = {impl: SLOW_ROUNDS if c.us > SLOW_US else rounds for impl, c in running.items()}
    return interleave(samplers, turns), "graph" if graphs else "events"


def interleave(samplers: dict[str, Sample], turns: dict[str, int]) -> dict[str, list[float]]:
    """A sample of each contestant a round, for as many rounds as it has turns."""
    samples: dict[str, list[float]] = {impl: [] for impl in samplers}
    order = list(samplers)
    for played in range(max(turns.values())):
        for impl in order:
            if played < turns[impl]:
                samples[impl].append(samplers[impl]())
        order = order[1:] + order[:1]  # nobody always follows the same one
    return samples


def ratio(times: Sequence[float], ikbo_times: Sequence[float]) -> float:
    """Median of ``times / ikbo_times`` over the rounds both played: above 1, ikbo is faster."""
    return statistics.median(a / b for a, b in zip(times, ikbo_times, strict=False))


def relative_error(result: Any, expected: Any) -> float:
    """The largest over results of ||a - b|| / ||b||; NaN where a result has one."""
    errors = [
        torch.linalg.vector_norm(a.float() - b.float())
        / torch.linalg.vector_norm(b.float()).clamp_min(1e-30)
        for a, b in zip(_tensors(result), _tensors(expected), strict=True)
    ]
    return float(torch.stack(errors).max())


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, SimpleNamespace):
        tree = vars(tree)
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _bytes(tree: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(tree))
