"""What a rewrite did, what it left and why; what it saves; and the check that nothing changed."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import sympy
from torch.export import ExportedProgram

from .cost import Cost, program_cost
from .engine import Entry
from .verify import Check, Inputs, Pair


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of rows in the rewritten program.

    Attributes:
        name: of its node.
        source: of the node whose rows it copies.
        elementwise: whether only element-wise ops and reductions read it, which a compiler fuses
            with it: then the rows are read through the map and no copy is made.
        readers: the ops that read it.
    """

    name: str
    source: str
    elementwise: bool
    readers: tuple[str, ...]

    def __str__(self) -> str:
        how = "read element by element" if self.elementwise else "copied"
        return f"{self.name} of {self.source}, {how}, for {', '.join(self.readers)}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The decisions of a rewrite; ``str(report)`` is a page to read.

    Attributes:
        original: the program before, on the same inputs as the rewritten one.
        rewritten: the program after; it shares the original's parameters.
        entries: the decisions, in the order of the program.
        lineages: of every value of the original by name, with its reason.
        copies: what still copies rows in the rewritten program.
        inputs: what is known of the inputs.
    """

    original: ExportedProgram
    rewritten: ExportedProgram
    entries: tuple[Entry, ...]
    lineages: Mapping[str, str]
    copies: tuple[Copy, ...]
    inputs: Inputs

    def of(self, action: str) -> list[Entry]:
        """The entries whose action begins so, for example ``"left"`` or ``"replaced"``."""
        return [e for e in self.entries if e.action.startswith(action)]

    @property
    def broadcasts(self) -> list[Copy]:
        """The copies that are made: for matrix products and other ops that no compiler fuses."""
        return [c for c in self.copies if not c.elementwise]

    @functools.cached_property
    def before(self) -> Cost:
        """What the original costs: ``report.before.flop`` in the sizes of the batches."""
        return self._cost(self.original)

    @functools.cached_property
    def after(self) -> Cost:
        """What the rewritten program costs."""
        return self._cost(self.rewritten)

    def _cost(self, program: ExportedProgram) -> Cost:
        sizes = {**self.inputs.sizes, **self.inputs.elements}
        names = {s: n for n, s in sizes.items() if isinstance(s, sympy.Symbol)}
        return program_cost(program, names)

    def speedup(
        self, *, copy_TBps: float, matmul_TFLOPS: float, launch_us: float = 0.0, **sizes: int
    ) -> float:
        """How many times as fast the rewritten program should be at a machine's ceilings.

        Of both programs, compiled, at given sizes: ``report.speedup(copy_TBps=4.2,
        matmul_TFLOPS=680, launch_us=2, user=15, candidates=1024)``.

        Args:
            copy_TBps: bytes of memory read and written, in 1e12 a second.
            matmul_TFLOPS: of matrix products, in 1e12 a second.
            launch_us: microseconds that a kernel takes whatever it does: few candidates take
                little more. 0 predicts for many.
            sizes: of each batch.
        """
        before, after = (
            c.seconds(
                copy_TBps=copy_TBps, matmul_TFLOPS=matmul_TFLOPS, launch_us=launch_us, **sizes
            )
            for c in (self.before, self.after)
        )
        return before / after

    @functools.cached_property
    def _pair(self) -> Pair:
        return Pair(self.original, self.rewritten)

    def verify(
        self, inputs: tuple[Any, ...] | Mapping[str, Any] | None = None, *, seed: int = 0
    ) -> list[Check]:
        """Runs both programs and the original in float64, and compares.

        Args:
            inputs: of the programs, a tuple, or a mapping by name; if None, inputs of every kind
                are made up: random ratios, unsorted maps, users without candidates, padding rows,
                one user, one candidate, as many users as candidates.
            seed: of what is made up.

        Returns:
            What was compared, with the largest error and its bound.

        Raises:
            AssertionError: a result of the rewritten program is further from the float64 one than
                a small multiple of what the original is, or differs where it can't be off.
            ValueError: no inputs can be made up, since a size in them is that of no batch.
        """
        if inputs is None:
            return self._pair.compare_generated(self.inputs, seed)
        given = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        return [self._pair.compare(given)]

    def __str__(self) -> str:
        counts = collections.Counter(e.action for e in self.entries)
        lines = ["rewrite: " + (", ".join(f"{n} {a}" for a, n in counts.items()) or "nothing done")]
        moved = [e for e in self.entries if e.action not in ("left", "deferred")]
        for title, entries in (("moved", moved), ("left", self.of("left"))):
            lines += ["", f"{title}:"] + [f"  {e.action} {e.node} ({e.op}): {e.reason}"
                                          for e in entries]  # fmt: skip
            lines += [] if entries else ["  nothing"]
        for title, copies in (
            ("copies of rows that remain", self.broadcasts),
            ("rows read through a map, element by element", set(self.copies) - {*self.broadcasts}),
        ):
            lines += ["", f"{title}:"]
            lines += [f"  {c}" for c in self.copies if c in copies] or ["  none"]
        lines += ["", "cost:"]
        for what in ("flop", "bytes"):
            before, after = (_rounded(getattr(c, what)) for c in (self.before, self.after))
            lines += [f"  {what} before: {before}", f"  {what} after:  {after}"]
        lines += [f"  kernels before: {self.before.launches}, after: {self.after.launches}"]
        return "\n".join(lines)


def _rounded(expression: Any) -> str:
    """With three digits: 1.25e+6*candidates + 3.1e+3*user."""
    terms = []
    for term in sympy.Add.make_args(sympy.expand(expression)):
        number, rest = term.as_coeff_Mul()
        terms.append((float(number), "" if rest == 1 else f" {rest}".replace("**", "^")))
    return " + ".join(f"{n:.3g}{rest}" for n, rest in sorted(terms, key=lambda t: -t[0]))
