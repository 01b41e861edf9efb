"""What a rewrite did, what it left and why; and the check that the program is still the same."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

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
            lines += ["", f"{title}:"] + [f"  {e.action} {e.node} ({e.op}): {e.reason}"
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
    roundings: float = 64.0,
) -> None:
    """Raises AssertionError unless both programs give the same on these inputs.

    The rewritten program's error against the original in float64 may be ``multiple`` times the
    largest that the original itself makes, and ``roundings`` roundings of a typical value: sums in
    another order. NaN and infinities must stand in the same places, integers must be equal.
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
            _compare(f"result {i}", b.double(), a.double(), e, multiple, roundings, a.dtype)


def _compare(
    name: str,
    got: Tensor,
    plain: Tensor,
    exact: Tensor,
    multiple: float,
    roundings: float,
    dtype: torch.dtype,
) -> None:
    for what, where in (("NaN", torch.isnan), ("inf", torch.isinf)):
        assert torch.equal(where(got), where(plain)), f"{name}: {what} in different places"
    finite = torch.isfinite(exact) & torch.isfinite(plain)
    if not finite.any():
        return
    error, own = ((t - exact)[finite].abs().max() for t in (got, plain))
    typical = exact[finite].square().mean().sqrt()
    bound = multiple * own + roundings * torch.finfo(dtype).eps * typical
    assert error <= bound, (
        f"{name}: error {error:.3e} > bound {bound:.3e} = {multiple} x the original's {own:.3e} + "
        f"{roundings} roundings of {typical:.3e}"
    )


def _results(program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return _run(program.module(), lambda t: t.clone(), args, kwargs)


def _exact(program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The original in float64; conversions that the program itself makes are made to float64."""
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    for node in list(module.graph.nodes):
        if "_assert_tensor_metadata" in str(node.target):
            module.graph.erase_node(node)
            continue
        node.args = pytree.tree_map(_wide, node.args)
        node.kwargs = pytree.tree_map(_wide, node.kwargs)
    module.recompile()
    args, kwargs = pytree.tree_map(_wide, (args, kwargs))
    return _run(module, lambda t: _wide(t.clone()), args, kwargs)


def _wide(x: Any) -> Any:
    """float64 for the other floating-point types and tensors of them."""
    if isinstance(x, torch.dtype):
        return torch.float64 if x.is_floating_point else x
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _run(
    module: nn.Module, of: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """On copies of its parameters and buffers, which it may update."""
    state = {n: of(t) for n, t in (*module.named_parameters(), *module.named_buffers())}
    return pytree.tree_leaves(torch.func.functional_call(module, state, args, kwargs))
