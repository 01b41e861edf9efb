"""Whether two programs are the same: on given inputs, or on inputs made up from their shapes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from .broadcasts import Form
from .lineage import CANDIDATES

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Map:
    """An input that says which rows are copied.

    Attributes:
        context: whose rows.
        form: how it says that.
        wraps: whether -1 is the last row, as in ``x[idx]``.
    """

    context: str
    form: Form
    wraps: bool


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison that held: the largest error among the results and what it might have been."""

    case: str
    error: float
    bound: float


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What is known of a program's inputs, to make up others.

    Attributes:
        fakes: of the leaves of its arguments, by placeholder's name, as export knows them.
        examples: the tensors it was exported with, in the same order.
        spec: how the leaves make the arguments.
        sources: the batch of each by name; without one an input is shared.
        maps: by the placeholder's name.
        sizes: the symbol of each batch's size.
        elements: those of jagged inputs, by what they are called in costs.
    """

    fakes: Mapping[str, Any]
    examples: tuple[Any, ...]
    spec: Any
    sources: Mapping[str, str]
    maps: Mapping[str, Map]
    sizes: Mapping[str, Any]
    elements: Mapping[str, Any]


class Pair:
    """The original and the rewritten program, to run side by side."""

    def __init__(self, original: ExportedProgram, rewritten: ExportedProgram) -> None:
        self._plain, self._new = original.module(), rewritten.module()
        self._exact = _widened(original)
        self._draws = any(
            torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
            for n in original.graph.nodes
        )
        self._typical: dict[int, float] = {}  # of a result, the largest of comparisons so far

    def compare(
        self,
        arguments: Arguments,
        case: str = "given",
        *,
        for_rewritten: Arguments | None = None,
        rows: Tensor | None = None,
        multiple: float = 4.0,
        roundings: float = 64.0,
    ) -> Check:
        """Raises AssertionError unless both give the same.

        The rewritten program's error against the original in float64 may be ``multiple`` times the
        largest that the original itself makes, and ``roundings`` roundings of a typical value, in
        this comparison or one before: sums in another order, of which one may be near zero. NaN and
        infinities must stand in the same places, integers must be equal.

        Args:
            for_rewritten: other arguments for the rewritten program.
            rows: which rows of the results count, a mask; all if None.
        """
        with torch.no_grad():
            want = _run(self._plain, lambda t: t.clone(), arguments)
            exact = self._in_float64(arguments, want)
            got = _run(self._new, lambda t: t.clone(), for_rewritten or arguments)
        assert len(want) == len(got), f"{case}: {len(want)} results became {len(got)}"
        worst = (0.0, 0.0)
        for i, (a, b, e) in enumerate(zip(want, got, exact, strict=True)):
            name = f"{case}: result {i}"
            if not isinstance(a, Tensor):
                assert a == b, f"{name}: {a} became {b}"
                continue
            assert a.dtype == b.dtype, f"{name}: {a.dtype} became {b.dtype}"
            assert a.shape == b.shape, f"{name}: {tuple(a.shape)} became {tuple(b.shape)}"
            if rows is not None and a.dim() and a.shape[0] == rows.shape[0]:
                a, b, e = (t[rows] for t in (a, b, e))
            if not a.is_floating_point():
                assert torch.equal(a, b), f"{name}: integers differ"
            elif a.numel():
                got_64, plain_64, e = _finite(name, b.double(), a.double(), e)
                if not e.numel():
                    continue
                here = float(e.square().mean().sqrt())
                typical = self._typical[i] = max(here, self._typical.get(i, 0.0))
                rounding = roundings * torch.finfo(a.dtype).eps * typical
                worst = max(worst, _bounded(name, got_64, plain_64, e, multiple, rounding))
        return Check(case, *worst)

    def _in_float64(self, arguments: Arguments, plain: list[Any]) -> list[Any]:
        """The original's results in float64; as they are, where an op in it has no float64.

        Random numbers are others in float64, too.
        """
        if self._draws:
            return [_wide(t) for t in plain]
        try:
            return _run(self._exact, lambda t: _wide(t.clone()), pytree.tree_map(_wide, arguments))
        except RuntimeError:
            return [_wide(t) for t in plain]

    def compare_generated(self, inputs: Inputs, seed: int) -> list[Check]:
        """The same on made-up inputs of every kind."""
        generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
        checks = []
        self._typical.clear()  # the same inputs, the same bounds
        for case, sizes in _cases(inputs, draw):
            given = made_up(inputs, sizes, generator)
            try:
                with torch.no_grad():
                    _run(self._plain, lambda t: t.clone(), given)
            except Exception as error:
                raise ValueError(
                    "ikbo.rewrite: expected inputs for verify(inputs=...): the original takes none "
                    f"that are made up ({case}): {error}"
                ) from error
            checks.append(self.compare(given, case))
        padded = self._compare_padded(inputs, draw, generator)
        return checks if padded is None else [*checks, padded]

    def _compare_padded(
        self, inputs: Inputs, draw: random.Random, generator: torch.Generator
    ) -> Check | None:
        """Candidates with -1 in a map: the last row for ``x[idx]``, else rows without a context.

        The original takes no such rows by ``index_select``; it gets other maps, and these rows of
        the results aren't compared. The rewritten program may refuse them, too.
        """
        maps = {n: m for n, m in inputs.maps.items()
                if m.form is Form.INDEX and inputs.sources.get(n) == CANDIDATES}  # fmt: skip
        if not maps:
            return None
        sizes = {s: draw.randint(3, 9) for s in inputs.sizes}
        sizes[CANDIDATES] = 12
        rows = torch.rand(12, generator=generator) < 0.3
        padding: dict[str, Tensor] = {}
        plain = made_up(inputs, sizes, generator)
        leaves = dict(zip(inputs.fakes, pytree.tree_leaves(plain), strict=True))
        for name in maps:
            padding[name] = leaves[name].masked_fill(rows.to(leaves[name].device), -1)
        padded = pytree.tree_unflatten(list({**leaves, **padding}.values()), inputs.spec)
        if all(m.wraps for m in maps.values()):
            return self.compare(padded, "-1 in the maps, the last row")
        if any(leaves[name].device.type != "cpu" for name in maps):
            return None  # a GPU doesn't raise on an index out of range: the process is lost
        try:
            return self.compare(plain, "padding rows", for_rewritten=padded, rows=~rows)
        except (IndexError, RuntimeError):
            return Check("padding rows: refused, as by the original", 0.0, 0.0)


def _cases(inputs: Inputs, draw: random.Random) -> Iterator[tuple[str, dict[str, int]]]:
    """Sizes of every kind; maps are at random, so unsorted, and users often have no candidate."""
    contexts = [s for s in inputs.sizes if s != CANDIDATES]

    def sizes(n_candidates: int, of_context: Callable[[], int]) -> dict[str, int]:
        return {**{c: of_context() for c in contexts}, CANDIDATES: n_candidates}

    for _ in range(2):
        ratio = draw.uniform(1, 30)
        users = draw.randint(2, 9)
        yield "a random ratio", sizes(max(2, round(users * ratio)), lambda n=users: n)  # type: ignore[misc]
    yield "users without candidates", sizes(4, lambda: draw.randint(9, 12))
    yield "U = 1", sizes(draw.randint(2, 30), lambda: 1)
    yield "B = 1", sizes(1, lambda: draw.randint(2, 9))
    yield "U = B = 1", sizes(1, lambda: 1)
    yield "B = U", sizes(7, lambda: 7)


def made_up(inputs: Inputs, sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    """Arguments with batches of these sizes.

    Numbers are normal with the example's mean and deviation, integers and booleans drawn from the
    example's elements, maps at random.
    """
    symbols = {inputs.sizes[s]: n for s, n in sizes.items() if s in inputs.sizes}
    pairs = zip(inputs.fakes.items(), inputs.examples, strict=True)
    leaves = [_leaf(inputs, name, fake, example, symbols, sizes, generator)
              for (name, fake), example in pairs]  # fmt: skip
    arguments: Arguments = pytree.tree_unflatten(leaves, inputs.spec)
    return arguments


def _leaf(
    inputs: Inputs,
    name: str,
    fake: Any,
    example: Any,
    symbols: Mapping[Any, int],
    sizes: Mapping[str, int],
    generator: torch.Generator,
) -> Any:
    if not isinstance(fake, Tensor):
        return example
    shape = []
    for size in fake.shape:
        known = size if isinstance(size, int) else size.node.expr.subs(symbols)
        if not isinstance(known, int) and known.free_symbols:
            raise ValueError(
                f"ikbo.rewrite: expected inputs for verify(inputs=...): the size {size} of "
                f"{name!r} is of no batch, so none can be made up."
            )
        shape.append(int(known))
    made = inputs.maps.get(name)
    if made is not None and made.form is Form.INDEX:
        rows = torch.randint(0, sizes[made.context], shape, generator=generator)
        return rows.to(example)
    if made is not None:
        ends = torch.randint(0, sizes[CANDIDATES] + 1, (shape[0] - 1,), generator=generator)
        ends = torch.cat([ends.sort().values, torch.tensor([sizes[CANDIDATES]])])
        return ends.diff(prepend=torch.zeros(1, dtype=ends.dtype)).to(example)
    if not fake.is_floating_point() or not example.numel():
        at = torch.randint(0, max(1, example.numel()), shape, generator=generator)
        return example.flatten()[at.to(example.device)] if example.numel() else at.to(example)
    wide = example.detach().double()
    spread = float(wide.std()) if wide.numel() > 1 else 1.0
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (numbers * (spread or 1.0) + float(wide.mean())).to(example)


def _finite(name: str, got: Tensor, plain: Tensor, exact: Tensor) -> list[Tensor]:
    """Their finite elements. NaN and infinities have to be in the same places."""
    for what, where in (("NaN", torch.isnan), ("inf", torch.isinf)):
        assert torch.equal(where(got), where(plain)), f"{name}: {what} in different places"
    finite = torch.isfinite(exact) & torch.isfinite(plain)
    return [t[finite] for t in (got, plain, exact)]


def _bounded(
    name: str, got: Tensor, plain: Tensor, exact: Tensor, multiple: float, rounding: float
) -> tuple[float, float]:
    error, own = (float((t - exact).abs().max()) for t in (got, plain))
    bound = multiple * own + rounding
    assert error <= bound, (
        f"{name}: error {error:.3e} > bound {bound:.3e} = {multiple} x the original's {own:.3e} + "
        f"{rounding:.3e} for rounding"
    )
    return error, bound


def _widened(program: ExportedProgram) -> nn.Module:
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
    return module


def _wide(x: Any) -> Any:
    """float64 for the other floating-point types and tensors of them."""
    if isinstance(x, torch.dtype):
        return torch.float64 if x.is_floating_point else x
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _run(module: nn.Module, of: Callable[[Tensor], Tensor], arguments: Arguments) -> list[Any]:
    """On copies of its parameters and buffers, which it may update; each run draws the same."""
    state = {n: of(t) for n, t in (*module.named_parameters(), *module.named_buffers())}
    args, kwargs = arguments
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return pytree.tree_leaves(torch.func.functional_call(module, state, args, kwargs))
