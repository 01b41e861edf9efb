"""Values that are not computed yet, and the graph that computes what is left of them.

A pass over the program keeps each value in the form that says most: a node, rows of a smaller value
read through a map, or parts that are to be joined. Only `Builder.node_of` makes a copy.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable
from typing import Any, Union

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

from .rules import Place, aten, value


@dataclasses.dataclass(frozen=True)
class RowMap:
    """Which row of a context each row of the copy is: an integer vector and the context's size."""

    node: fx.Node
    rows: fx.Node | int


@dataclasses.dataclass(frozen=True)
class Gathered:
    """``source`` with its rows, which stand at ``place``, read through ``map``."""

    source: fx.Node
    map: RowMap
    place: Place


Part = Union[fx.Node, Gathered]  # noqa: UP007  (fx.Node | "..." fails at run time)
Range = tuple[int, int]  # from, to


@dataclasses.dataclass(frozen=True)
class Joined:
    """``cat(parts, dim)``, not yet made; or, with ``columns``, the same in another order.

    Attributes:
        columns: for each part the ranges along ``dim`` in which its columns stand, in their order.
    """

    parts: tuple[Part, ...]
    dim: int
    columns: tuple[tuple[Range, ...], ...] | None = None

    @property
    def sizes(self) -> list[Any]:
        """The parts' sizes along ``dim``."""
        return [shape_of(p)[self.dim] for p in self.parts]

    @property
    def ranges(self) -> tuple[tuple[Range, ...], ...]:
        """``columns``, also where the parts stand one after another."""
        if self.columns is not None:
            return self.columns
        stops = list(itertools.accumulate(self.sizes))
        starts = [0, *stops[:-1]]
        return tuple(((a, b),) for a, b in zip(starts, stops, strict=True))


@dataclasses.dataclass(frozen=True)
class Grid:
    """A product of joined rows and joined columns, ``[rows, F, G]``, in blocks of dims 1 and 2."""

    blocks: tuple[tuple[Part, ...], ...]


@dataclasses.dataclass(frozen=True)
class Jagged:
    """Rows of different lengths one after another, whole rows of ``values`` read through a map.

    Attributes:
        values: the source's.
        lengths: the rows' lengths, read in the same way.
        plain: the value itself.
    """

    values: fx.Node
    lengths: Gathered
    plain: fx.Node


@dataclasses.dataclass(frozen=True)
class Offsets:
    """Where the rows of a Jagged value begin; if ``whole``, the end of the last too."""

    lengths: Gathered
    whole: bool
    plain: fx.Node


Lazy = Union[fx.Node, Gathered, Joined, Grid, Jagged, Offsets]  # noqa: UP007


def shape_of(lazy: fx.Node | Gathered) -> tuple[Any, ...]:
    """The sizes of the value; a Gathered one has its source's size where the rows stand."""
    return tuple(value(lazy if isinstance(lazy, fx.Node) else lazy.source).shape)


class Builder:
    """Appends ops to a graph; equal calls become one node."""

    def __init__(self, fake_mode: Any) -> None:
        self.graph = fx.Graph()
        self.fake_mode = fake_mode
        self._made: dict[Any, fx.Node] = {}
        self._sizes: dict[Any, fx.Node] = {}
        self._copies: dict[fx.Node, Gathered] = {}

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A deterministic op on nodes and constants."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (target, tuple((type(leaf), leaf) for leaf in leaves), spec)
        if key not in self._made:
            node = self.graph.call_function(target, args, kwargs)
            known = [value(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
            fake_args, fake_kwargs = pytree.tree_unflatten(known, spec)
            # The dispatcher with which export traces: others take some sizes as constants.
            with self.fake_mode, enable_python_dispatcher(), torch.no_grad():
                node.meta["val"] = target(*fake_args, **fake_kwargs)
            self._made[key] = node
        return self._made[key]

    def size(self, node: fx.Node, dim: int = 0) -> fx.Node | int:
        """A size: a number where it is known, else a node, the same for equal sizes."""
        size = value(node).shape[dim]
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression not in self._sizes:
            self._sizes[expression] = self.call(aten.sym_size.int, node, dim)
        return self._sizes[expression]

    def product(self, *factors: fx.Node | int) -> fx.Node | int:
        """A product of sizes."""
        result: fx.Node | int = 1
        for factor in factors:
            if isinstance(result, int) and isinstance(factor, int):
                result = result * factor
            elif result == 1:
                result = factor
            elif factor != 1:
                result = self.call(operator.mul, result, factor)
        return result

    def cat(self, nodes: list[fx.Node], dim: int) -> fx.Node:
        """A concatenation; of one node, that."""
        return nodes[0] if len(nodes) == 1 else self.call(aten.cat.default, nodes, dim)

    def together(self, weight: fx.Node) -> fx.Node:
        """A weight to compute with: columns of one are copied, so that they lie together.

        AOTInductor, folding constants at run time, reads them as if they did (torch 2.13).
        """
        if weight.target is not aten.slice.Tensor:
            return weight
        return self.call(aten.clone.default, weight, memory_format=torch.contiguous_format)

    def node_of(self, lazy: Lazy) -> fx.Node:
        """The value itself; here, and only here, rows are copied."""
        if isinstance(lazy, fx.Node):
            return lazy
        if isinstance(lazy, Joined):
            return self._cat_of(lazy)
        if isinstance(lazy, Grid):
            rows = [self.call(aten.cat.default, [self.node_of(b) for b in row], 2)
                    for row in lazy.blocks]  # fmt: skip
            return self.call(aten.cat.default, rows, 1)
        if isinstance(lazy, (Jagged, Offsets)):
            return lazy.plain
        index = self._index(lazy.map, lazy.place)
        copy = self.call(aten.index_select.default, lazy.source, lazy.place.dim, index)
        self._copies[copy] = lazy
        return copy

    def _cat_of(self, joined: Joined) -> fx.Node:
        parts, dim = [self.node_of(p) for p in joined.parts], joined.dim
        if joined.columns is None:
            return self.call(aten.cat.default, parts, dim)
        pieces: list[tuple[int, fx.Node]] = []
        for part, ranges in zip(parts, joined.columns, strict=True):
            taken = 0
            for a, b in ranges:
                piece = self.call(aten.slice.Tensor, part, dim, taken, taken + b - a)
                pieces.append((a, piece))
                taken += b - a
        ordered = [piece for _, piece in sorted(pieces, key=lambda p: p[0])]
        return self.call(aten.cat.default, ordered, dim)

    def copy_of(self, node: fx.Node) -> Gathered | None:
        """What a node copies the rows of, if it is such a copy."""
        return self._copies.get(node)

    def copies(self) -> list[tuple[fx.Node, fx.Node]]:
        """The copies of rows in the graph as it is now, each with its source."""
        return [(n, self._copies[n].source) for n in self.graph.nodes if n in self._copies]

    def _index(self, rows: RowMap, place: Place) -> fx.Node:
        """The map for a dimension of size outer * rows * inner."""
        index = rows.node
        on = {"dtype": torch.int64, "device": value(index).device}
        if place.outer > 1:
            outer = self.call(aten.arange.default, place.outer, **on)
            outer = self.call(aten.mul.Tensor, outer, rows.rows)
            outer = self.call(aten.unsqueeze.default, outer, 1)
            index = self.call(aten.add.Tensor, outer, index)
            index = self.call(aten.view.default, index, [-1])
        if place.inner > 1:
            inner = self.call(aten.arange.default, place.inner, **on)
            index = self.call(aten.mul.Tensor, index, place.inner)
            index = self.call(aten.unsqueeze.default, index, 1)
            index = self.call(aten.add.Tensor, index, inner)
            index = self.call(aten.view.default, index, [-1])
        return index
