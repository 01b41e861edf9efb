"""The pass: one walk over the program, in which copies of rows are put off for as long as possible.

A copy becomes a `Gathered` value; row-wise ops act on its source; products over a concatenation are
split (`algebra`). The first op for which nothing is proved gets the copy itself.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from .broadcasts import VIEWS, Broadcast, Form, broadcast
from .lineage import Lineage, rows_of
from .rules import (
    RULES,
    Place,
    RefusedError,
    argument,
    aten,
    is_tensor,
    named_arguments,
    place_of_result,
    same,
    value,
)
from .values import Builder, Gathered, Jagged, Joined, Lazy, RowMap
from .verify import Map


@dataclasses.dataclass(frozen=True)
class Entry:
    """One decision of the pass.

    Attributes:
        action: ``broadcast`` (a copy was recognised), ``merged`` (it equals an earlier one),
            ``sunk`` (the op now runs on the context's rows), ``split``, ``replaced`` or ``left``.
        node: the op's name in the original program.
        op: what it calls.
        reason: why.
        lineage: of its result.
    """

    action: str
    node: str
    op: str
    reason: str
    lineage: str


Done = tuple[Lazy, str, str]  # the new value, what was done, why
Algebra = Callable[["Rewriter", fx.Node], Done | None]
# Ops that take a concatenation of no copies apart, too.
KEEPING = {op for op, rule in RULES.items() if rule.reason == "element-wise"}
ASSERTS = (
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
SIZED = (*VIEWS, aten.expand.default)


class Rewriter:
    """Rewrites one graph. ``algebra`` is what may be done with an op beside sinking it."""

    def __init__(
        self,
        graph: fx.Graph,
        lineages: Mapping[fx.Node, Lineage],
        context_sizes: Mapping[str, object],
        algebra: Algebra,
        fake_mode: Any,
        constants: Mapping[str, torch.Tensor],
        first_input: str,
    ) -> None:
        self.lineages = lineages
        self.new_constants: dict[fx.Node, torch.Tensor] = {}
        self._constants = constants
        self._first_input_name = first_input
        self._first_input: fx.Node | None = None
        self.builder = Builder(fake_mode)
        self.values: dict[fx.Node, Lazy] = {}
        self.maps: dict[str, Map] = {}
        # Lengths copied by reorder_batched_ad_lengths: the lengths and offsets it was given.
        self.reordered: dict[Gathered, tuple[fx.Node, fx.Node]] = {}
        self._entries: list[tuple[Entry, fx.Node]] = []
        self._old = graph
        self.sizes = context_sizes
        self._algebra = algebra
        self._seen: set[Gathered] = set()
        # An index that is read as x[idx] anywhere may be negative; so may it everywhere then.
        found = (broadcast(n) for n in graph.nodes)
        self._wraps = {f.by for f in found if f is not None and f.wraps}

    def run(self) -> fx.Graph:
        """The new graph."""
        for node in self._old.nodes:
            if node.target in ASSERTS and self._is_of_jagged_size(node):
                continue  # the copy may be gone, and it holds of any size
            if node.op == "call_function":
                self.values[node] = self._rewritten(node)
            elif node.name == self._first_input_name:
                self.values[node] = self._first_input = self.copied(node)
            else:
                self.values[node] = self.copied(node)
        self.builder.graph.eliminate_dead_code()
        for node in [n for n in self.new_constants if not n.users]:
            self.builder.graph.erase_node(node)
            del self.new_constants[node]
        return self.builder.graph

    def _is_of_jagged_size(self, node: fx.Node) -> bool:
        """Whether something depends on nothing but how many elements copied jagged rows have."""
        if node.target is aten.sym_size.int:
            return isinstance(self.values.get(argument(node, 0)), Jagged)
        inputs = node.all_input_nodes
        return bool(inputs) and all(self._is_of_jagged_size(n) for n in inputs)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The decisions, but those on what is needed no longer: its users took it apart."""
        kept = set(self.builder.graph.nodes)
        return tuple(e for e, n in self._entries
                     if e.action != "left" or n.op == "output" or self._is_in(kept, n))  # fmt: skip

    def _is_in(self, kept: set[fx.Node], node: fx.Node) -> bool:
        """Whether the new graph has what became of a node; of parts, one that reads a copy."""
        new = self.values.get(node)
        if isinstance(new, Joined):
            copy_of = self.builder.copy_of
            return any(isinstance(p, fx.Node) and p in kept and any(map(copy_of, p.all_input_nodes))
                       for p in new.parts)  # fmt: skip
        return not isinstance(new, fx.Node) or new in kept

    def lazy(self, node: Any) -> Lazy:
        """The new value of a node of the original program."""
        assert isinstance(node, fx.Node)
        return self.values[node]

    def plain(self, node: Any) -> fx.Node:
        """The same, copied if need be."""
        return self.builder.node_of(self.lazy(node))

    def is_shared(self, node: fx.Node) -> bool:
        return not self.lineages[node].sources and isinstance(self.values[node], fx.Node)

    def constant(self, node: fx.Node) -> torch.Tensor | None:
        """The value of a node of the original that depends on constants only, else None."""
        if node.op == "placeholder":
            return self._constants.get(node.name)
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(
            node.target, "tags", ()
        ):
            return None
        inputs = {n: self.constant(n) for n in node.all_input_nodes}
        if any(v is None for v in inputs.values()):
            return None
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), inputs.__getitem__)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def new_constant(self, tensor: torch.Tensor) -> fx.Node:
        """A constant of the new program."""
        for node, known in self.new_constants.items():
            if known.dtype == tensor.dtype and torch.equal(known, tensor):
                return node
        graph = self.builder.graph
        assert self._first_input is not None
        with graph.inserting_before(self._first_input):
            node = graph.placeholder(f"ikbo_index_{len(self.new_constants)}")
        node.meta["val"] = self.builder.fake_mode.from_tensor(tensor, static_shapes=True)
        self.new_constants[node] = tensor
        return node

    def named_op(self, name: str) -> Any:
        """An op by its name, of a library that the original uses."""
        namespace, op, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)

    def note(self, action: str, node: fx.Node, reason: str) -> None:
        lineage = self.lineages.get(node)
        text = "" if lineage is None else str(lineage)
        self._entries.append((Entry(action, node.name, str(node.target), reason, text), node))

    def _rewritten(self, node: fx.Node) -> Lazy:
        found = broadcast(node)
        if found is not None:
            gathered = self.gathered(node, found)
            if gathered is not None:
                return gathered
        for n in node.all_input_nodes:
            lazy = self.values[n]
            if (
                isinstance(lazy, Joined)
                and not any(isinstance(p, Gathered) for p in lazy.parts)
                and node.target not in KEEPING
            ):
                self.values[n] = self.builder.node_of(lazy)
        done = self._algebra(self, node)
        if done is not None:
            lazy, action, reason = done
            self.note(action, node, reason)
            return lazy
        lazies = [n for n in node.all_input_nodes if not isinstance(self.values[n], fx.Node)]
        if not lazies:
            return self.copied(node)
        if node.target is aten.sym_size.int:
            size = self._size(node)
            if size is not None:
                return size
        try:
            result, reason = self._sunk(node)
        except RefusedError as refused:
            return self._left(node, str(refused))
        self.note("sunk", node, reason)
        return result

    def as_it_is(self, node: fx.Node) -> Lazy | None:
        """The op with nothing done to it but sinking; None where that isn't proved."""
        if all(isinstance(self.values[n], fx.Node) for n in node.all_input_nodes):
            return self.copied(node)
        try:
            return self._sunk(node)[0]
        except RefusedError:
            return None

    def _left(self, node: fx.Node, reason: str) -> fx.Node:
        self.note("left", node, reason)
        return self.copied(node)

    def copied(self, node: fx.Node) -> fx.Node:
        """The op as it is in the original, on copies if need be."""
        copy = self.builder.graph.node_copy(node, self.plain)
        copy.target = any_strides(copy.target)
        if node.op == "output":
            for n in node.all_input_nodes:
                if not isinstance(self.values[n], fx.Node):
                    self.note("left", n, "it is an output of the program")
        return copy

    # Copies of rows.

    def gathered(self, node: fx.Node, found: Broadcast) -> Gathered | None:
        """The rows that a broadcast copies, or None if that they are a context's isn't proved."""
        context = rows_of(found.source, self.lineages, self.sizes)
        if not context:
            return None
        index = found.by if isinstance(found.by, fx.Node) else None
        if found.form is Form.INDEX and index and self.lineages[index].axis == context:
            return None  # rows of one batch in another order
        source = self.lazy(found.source)
        if isinstance(source, Gathered) and not source.place.leading:
            source = self.builder.node_of(source)
        if not isinstance(source, Gathered):
            source = self.builder.node_of(source)
        of = source if isinstance(source, fx.Node) else self.builder.node_of(source)
        rows = self.builder.size(of)
        made = self._map_node(node, found, rows)
        if made is None:
            return None
        if isinstance(source, Gathered):
            # A map into rows that are themselves read through a map: one map for both.
            made = self.builder.call(aten.index_select.default, source.map.node, 0, made)
            gathered = Gathered(source.source, RowMap(made, source.map.rows), Place())
        else:
            gathered = Gathered(source, RowMap(made, rows), Place())
        given = _given(index)
        if given:
            self.maps[given] = Map(context, found.form, found.by in self._wraps)
        again = gathered in self._seen
        self._seen.add(gathered)
        self.note("merged" if again else "broadcast", node, f"rows of {context}: {found.reason}")
        return gathered

    def _map_node(self, node: fx.Node, found: Broadcast, rows: fx.Node | int) -> fx.Node | None:
        b = self.builder
        on = {"dtype": torch.int64, "device": value(found.source).device}
        if found.form is Form.INDEX:
            index = self.plain(found.by)
            if found.by not in self._wraps:
                return index
            negative = b.call(aten.lt.Scalar, index, 0)
            from_end = b.call(aten.add.Tensor, index, rows)
            return b.call(aten.where.self, negative, from_end, index)
        if found.form is Form.COUNTS:
            size = named_arguments(node)["output_size"]
            if size is None:
                return None  # the number of copies is known to the data only
            size = self.plain(size) if isinstance(size, fx.Node) else size
            return b.call(aten.repeat_interleave.Tensor, self.plain(found.by), output_size=size)
        if found.form is Form.REPEAT:
            each = b.call(aten.arange.default, b.product(rows, found.by), **on)
            return b.call(aten.div.Tensor_mode, each, found.by, rounding_mode="floor")
        size = named_arguments(node)["size"][0]
        size = self.plain(size) if isinstance(size, fx.Node) else size
        return b.call(aten.full.default, [size], 0, **on)

    # Ops on the source of a copy.

    def _sunk(self, node: fx.Node) -> tuple[Lazy, str]:
        """The op on the source of its copied arguments.

        Raises:
            RefusedError: it isn't proved that this is the same.
        """
        places, rows = self._copied_arguments(node)
        place, reason = place_of_result(node, places)
        results = value(node)
        if isinstance(results, (tuple, list)) and any(
            u.target is not operator.getitem for u in node.users
        ):
            raise RefusedError("its results are used together")
        self._check_sizes(node, rows, place.dim if node.target in SIZED else None)
        args = fx.node.map_arg((node.args, dict(node.kwargs)), self._source_or_shared)
        positional, keywords = args
        if node.target in SIZED:
            size = self.builder.product(place.outer, rows.rows, place.inner)
            positional = self._with_size(node, place.dim, size)
        call = self.builder.call(any_strides(node.target), *positional, **keywords)
        return Gathered(call, rows, place), reason

    def _copied_arguments(self, node: fx.Node) -> tuple[dict[fx.Node, Place], RowMap]:
        places: dict[fx.Node, Place] = {}
        maps: list[RowMap] = []
        for n in node.all_input_nodes:
            lazy = self.values[n]
            if isinstance(lazy, Gathered):
                places[n] = lazy.place
                maps.append(lazy.map)
            elif not isinstance(lazy, fx.Node):
                raise RefusedError("no rule for parts that are not joined yet in it")
            elif is_tensor(n) and self.lineages[n].sources:
                if _is_elementwise(node):
                    raise RefusedError("an element-wise join with other rows, one read each")
                raise RefusedError("it joins other rows, which are no copies")
        if any(m != maps[0] for m in maps):
            raise RefusedError("it joins rows of different contexts")
        return places, maps[0]

    def _source_or_shared(self, node: fx.Node) -> fx.Node:
        lazy = self.values[node]
        assert isinstance(lazy, (fx.Node, Gathered))
        return lazy.source if isinstance(lazy, Gathered) else lazy

    def _with_size(self, node: fx.Node, dim: int, size: fx.Node | int) -> tuple[Any, ...]:
        """The arguments of a view with the size of one dimension changed."""
        sizes = [self.values[s] if isinstance(s, fx.Node) else s for s in _sizes(node)]
        sizes[dim] = size
        if sizes.count(-1) > 1 and node.target is not aten.expand.default:
            raise RefusedError("its sizes can't be written for the context's rows")
        return (self._source_or_shared(argument(node, 0)), sizes, *node.args[2:])

    def _check_sizes(self, node: fx.Node, rows: RowMap, but: int | None) -> None:
        """No size that the op is given may depend on the number of copies."""
        copies = free_symbols(value(rows.node).shape[0])
        for i, s in enumerate(_size_arguments(node)):
            if isinstance(s, fx.Node) and i != but and free_symbols(value(s)) & copies:
                raise RefusedError("a size in it depends on the number of rows")

    def _size(self, node: fx.Node) -> fx.Node | None:
        """A size of a copy, without the copy."""
        lazy, dim = self.lazy(node.args[0]), node.args[1]
        if not isinstance(lazy, Gathered) or not isinstance(dim, int):
            return None
        if dim != lazy.place.dim:
            return self.builder.call(aten.sym_size.int, lazy.source, dim)
        if lazy.place.at(0) != Place():
            return None
        return self.builder.call(aten.sym_size.int, lazy.map.node, 0)


def _given(index: fx.Node | None) -> str:
    """The name of the input that an index is, or one row of which it is."""
    while index is not None and index.target in (operator.getitem, aten.select.int,
                                                 aten.unbind.int):  # fmt: skip
        index = argument(index, 0)
    return index.name if index is not None and index.op == "placeholder" else ""


def any_strides(target: Any) -> Any:
    """reshape for view: a value may now lie in memory in another order than in the original."""
    return aten.reshape.default if target in VIEWS else target


def _is_elementwise(node: fx.Node) -> bool:
    rule = RULES.get(node.target)
    return rule is not None and rule.reason == "element-wise"


def _sizes(node: fx.Node) -> Sequence[Any]:
    """The sizes that a view is given."""
    named = named_arguments(node)
    sizes: Sequence[Any] = named["size" if "size" in named else "shape"]
    return sizes


def _size_arguments(node: fx.Node) -> list[Any]:
    if node.target in SIZED:
        return list(_sizes(node))
    if node.target is operator.getitem:
        return []
    return [n for n in node.all_input_nodes if not is_tensor(n) and _is_symbolic(n)]


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(value(node), torch.SymInt)


def equal_shapes(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two shapes are equal for every batch size."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
