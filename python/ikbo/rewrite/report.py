"""What a rewrite did, what it left and why; and the check that the program is still the same."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ..testing import assert_matches_definition
from .engine import Entry


@dataclasses.dataclass(frozen=True)
class Report:
    """The decisions of a rewrite; ``str(report)`` is a page to read.

    Attributes:
        original: the program before, on the same inputs as the rewritten one.
        rewritten: the program after; it shares the original's parameters.
        entries: the decisions, in the order of the program.
        lineages: of every value of the original by name, with its reason.
        copies: what still copies rows in the rewritten program, by name.
    """

    original: ExportedProgram
    rewritten: ExportedProgram
    entries: tuple[Entry, ...]
    lineages: Mapping[str, str]
    copies: tuple[str, ...]

    def of(self, action: str) -> list[Entry]:
        """The entries whose action begins so, for example ``"left"`` or ``"replaced"``."""
        return [e for e in self.entries if e.action.startswith(action)]

    def verify(self, *args: Any, **kwargs: Any) -> None:
        """Runs both programs on the given inputs, the original's in float64 too.

        Raises:
            AssertionError: a result of the rewritten program is further from the float64 one than
                a small multiple of what the original is, or differs where it can't be off.
        """
        compare_programs(self.original, self.rewritten, args, kwargs)

    def __str__(self) -> str:
        counts = collections.Counter(e.action for e in self.entries)
        lines = ["rewrite: " + (", ".join(f"{n} {a}" for a, n in counts.items()) or "nothing done")]
        moved = [e for e in self.entries if e.action not in ("left", "deferred")]
        for title, entries in (("moved", moved), ("left", self.of("left"))):
            lines += ["", f"{title}:"] + [f"  {e.action:<12} {e.node} ({e.op}): {e.reason}"
                                          for e in entries]  # fmt: skip
            lines += [] if entries else ["  nothing"]
        lines += ["", "copies of rows that remain:"]
        lines += [f"  {name}" for name in self.copies] or ["  none"]
        return "\n".join(lines)


def compare_programs(
    original: ExportedProgram,
    rewritten: ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    multiple: float = 4.0,
) -> None:
    """Raises AssertionError unless both programs give the same on these inputs.

    The bound is that of :func:`ikbo.testing.assert_matches_definition`: ``multiple`` times the
    error that the original itself makes against float64. Integers must be equal.
    """
    keywords = dict(kwargs or {})
    with torch.no_grad():
        want = _results(original, args, keywords)
        got = _results(rewritten, args, keywords)
        exact = _exact(original, args, keywords)
    assert len(want) == len(got), f"{len(want)} results became {len(got)}"
    for i, (a, b, e) in enumerate(zip(want, got, exact, strict=True)):
        if not isinstance(a, Tensor):
            assert a == b, f"result {i}: {a} became {b}"
            continue
        assert a.dtype == b.dtype, f"result {i}: {a.dtype} became {b.dtype}"
        assert a.shape == b.shape, f"result {i}: {tuple(a.shape)} became {tuple(b.shape)}"
        if not a.is_floating_point():
            assert torch.equal(a, b), f"result {i}: integers differ"
        elif a.numel():
            assert_matches_definition(b, e, a, multiple=multiple)


def _results(
    program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    # Buffers that the program updates must not reach the next run.
    module = copy.deepcopy(program.module())
    return pytree.tree_leaves(module(*args, **kwargs))


def _exact(program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The original in float64; conversions that the program itself makes are made to float64."""

    def widened(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    module = copy.deepcopy(program.module()).double()
    assert isinstance(module, torch.fx.GraphModule)
    floats = (torch.float32, torch.float16, torch.bfloat16)
    for node in list(module.graph.nodes):
        if "_assert_tensor_metadata" in str(node.target):
            module.graph.erase_node(node)
        elif node.kwargs.get("dtype") in floats:
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
        else:
            node.args = tuple(torch.float64 if a in floats else a for a in node.args
                              if True)  # fmt: skip
    module.recompile()
    wide_args, wide_kwargs = pytree.tree_map(widened, (args, kwargs))
    return pytree.tree_leaves(module(*wide_args, **wide_kwargs))
