"""Concatenations of different rows stay apart for as long as ops act on their parts one by one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..engine import SIZED, Done, Rewriter, any_strides, equal_shapes
from ..rules import (
    ALL,
    RULES,
    Place,
    RefusedError,
    aten,
    is_tensor,
    named_arguments,
    place_of_result,
    same,
    value,
)
from ..values import Gathered, Grid, Joined, Part, Range
from .forms import columns_of
from .registry import algebra_for


@algebra_for(aten.cat.default, aten.concat.default, aten.concatenate.default, aten.hstack.default)
def concatenation(r: Rewriter, node: fx.Node) -> Done | None:
    """``cat`` of rows of different batches is put off."""
    named = named_arguments(node)
    tensors, rank = list(named["tensors"]), value(node).dim()
    if any(value(n).dim() != rank for n in tensors):
        return None  # empty 1-D tensors, which cat skips
    dim = named.get("dim", 1) % rank  # hstack has none
    parts: list[Part] = []
    columns: list[tuple[tuple[int, int], ...]] = []
    begin = 0
    for n in tensors:
        size = value(n).shape[dim]
        if not isinstance(size, int):
            return None
        lazy = r.lazy(n)
        if isinstance(lazy, Joined) and lazy.dim == dim:
            parts += lazy.parts
            columns += [tuple((begin + a, begin + b) for a, b in c) for c in lazy.ranges]
        else:
            parts.append(lazy if isinstance(lazy, Gathered) else r.builder.node_of(lazy))
            columns.append(((begin, begin + size),))
        begin += size
    return _joined(tensors, parts, dim, tuple(columns))


@algebra_for(aten.stack.default)
def stack(r: Rewriter, node: fx.Node) -> Done | None:
    """``stack`` is ``cat`` along a new dimension."""
    named = named_arguments(node)
    tensors, dim = list(named["tensors"]), named["dim"] % value(node).dim()

    def part(n: fx.Node) -> Part:
        lazy = r.lazy(n)
        if isinstance(lazy, Gathered) and lazy.place.leading:
            source = r.builder.call(aten.unsqueeze.default, lazy.source, dim)
            return Gathered(source, lazy.map, lazy.place)
        return r.builder.call(aten.unsqueeze.default, r.builder.node_of(lazy), dim)

    if dim == 0 or not any(isinstance(r.lazy(n), Gathered) for n in tensors):
        return None
    columns = tuple(((i, i + 1),) for i in range(len(tensors)))
    return _joined(tensors, [part(n) for n in tensors], dim, columns)


def _joined(
    tensors: list[fx.Node], parts: list[Part], dim: int, columns: tuple[tuple[Range, ...], ...]
) -> Done | None:
    maps = {p.map for p in parts if isinstance(p, Gathered)}
    if not maps or (len(maps) == 1 and not any(isinstance(p, fx.Node) for p in parts)):
        return None  # no copies, or all of the same rows: sunk or left as any op
    if dim == 0 or not all(isinstance(p, fx.Node) or p.place.leading for p in parts):
        return None
    if len({value(n).dtype for n in tensors}) != 1:
        return None
    plain = Joined(tuple(parts), dim)
    joined = plain if plain.ranges == columns else Joined(plain.parts, dim, columns)
    return joined, "deferred", "a concatenation of different rows, made where it must be"


def each(joined: Joined, on: Callable[[fx.Node], fx.Node], dim: int) -> Joined:
    """``on`` of each part's source, joined along ``dim``."""
    parts = tuple(
        Gathered(on(p.source), p.map, p.place) if isinstance(p, Gathered) else on(p)
        for p in joined.parts
    )
    return Joined(parts, dim, joined.columns)


def on_parts(r: Rewriter, node: fx.Node) -> Done | None:
    """An op that treats the joined dimension, as well as the rows, one by one."""
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    joined = {n: lazy for n in tensors if isinstance(lazy := r.values[n], Joined)}
    others = [n for n in tensors if n not in joined]
    if not joined or not isinstance(value(node), torch.Tensor) or node.target in SIZED:
        return None
    if len(tensors) != len(node.all_input_nodes) or not all(r.is_shared(n) for n in others):
        return None
    first, *rest = joined.values()
    if not all(_alike(first, other) for other in rest):
        return None
    try:
        rows, _ = place_of_result(node, {n: Place() for n in joined})
        along, reason = place_of_result(node, {n: Place(j.dim) for n, j in joined.items()})
    except RefusedError:
        return None
    if not rows.leading or along != Place(along.dim):
        return None

    def on(i: int) -> Part:
        parts = {n: j.parts[i] for n, j in joined.items()}

        def source(n: fx.Node) -> Any:
            part = parts.get(n)
            return part.source if isinstance(part, Gathered) else part or r.values[n]

        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), source)
        call = r.builder.call(any_strides(node.target), *args, **kwargs)
        of = first.parts[i]
        return Gathered(call, of.map, Place()) if isinstance(of, Gathered) else call

    parts = tuple(on(i) for i in range(len(first.parts)))
    result = Joined(parts, along.dim, first.columns)
    return result, "sunk", f"{reason}, on each part of a concatenation"


def _alike(a: Joined, b: Joined) -> bool:
    """Whether two concatenations have the same parts, of the same rows, in the same places."""
    return same_places(a, b) and all(
        x.map == y.map if isinstance(x, Gathered) and isinstance(y, Gathered)
        else isinstance(x, fx.Node) and isinstance(y, fx.Node)
        for x, y in zip(a.parts, b.parts, strict=True)
    )  # fmt: skip


def same_places(a: Joined, b: Joined) -> bool:
    """Whether two concatenations have parts of the same sizes in the same places."""
    return a.dim == b.dim and a.ranges == b.ranges


@algebra_for(*(op for op, rule in RULES.items() if rule.reason == "element-wise"))
def elementwise(r: Rewriter, node: fx.Node) -> Done | None:
    """An element-wise op of a concatenation and other values, on each part."""
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    joined = {n: lazy for n in tensors if isinstance(lazy := r.values[n], Joined)}
    if not joined or len(tensors) != len(node.all_input_nodes):
        return None
    first, rank = next(iter(joined.values())), value(node).dim()
    if first.columns is not None or not equal_shapes(
        tuple(value(next(iter(joined))).shape), tuple(value(node).shape)
    ):
        return None
    for n in tensors:
        lazy = r.values[n]
        if isinstance(lazy, Joined):
            if value(n).dim() != rank or not same_places(first, lazy):
                return None
        elif isinstance(lazy, Gathered):
            if value(n).dim() != rank or not lazy.place.leading:
                return None
        elif not isinstance(lazy, fx.Node):
            return None

    def operand(n: fx.Node, i: int) -> Part:
        lazy = r.values[n]
        if isinstance(lazy, Joined):
            return lazy.parts[i]
        assert isinstance(lazy, (fx.Node, Gathered))
        source = lazy.source if isinstance(lazy, Gathered) else lazy
        dim, ((a, b),) = first.dim - rank + value(source).dim(), first.ranges[i]
        if dim >= 0 and not same(value(source).shape[dim], 1):
            source = columns_of(r, source, dim, a, b)
        return Gathered(source, lazy.map, lazy.place) if isinstance(lazy, Gathered) else source

    joins = False
    parts: list[Part] = []
    for i in range(len(first.parts)):
        operands = {n: operand(n, i) for n in tensors}
        maps = {p.map for p in operands.values() if isinstance(p, Gathered)}
        rows = [n for n, p in operands.items() if isinstance(p, fx.Node) and not r.is_shared(n)]
        if len(maps) == 1 and not rows and _shared_alike(r, node, operands):
            nodes = {n: p.source if isinstance(p, Gathered) else p for n, p in operands.items()}
            parts.append(Gathered(_call(r, node, nodes), maps.pop(), Place()))
        else:
            joins = joins or bool(maps)
            nodes = {n: r.builder.node_of(p) for n, p in operands.items()}
            parts.append(_call(r, node, nodes))
    result = Joined(tuple(parts), first.dim)
    if joins:
        return result, "left", "an element-wise join with other rows, one read each"
    return result, "sunk", "element-wise, on each part of a concatenation"


def _shared_alike(r: Rewriter, node: fx.Node, operands: dict[fx.Node, Part]) -> bool:
    """Whether what is shared is the same for all rows: nothing of it stands along dimension 0."""
    rank = value(node).dim()
    return all(value(p).dim() < rank or same(value(p).shape[0], 1)
               for p in operands.values() if isinstance(p, fx.Node))  # fmt: skip


def _call(r: Rewriter, node: fx.Node, nodes: dict[fx.Node, fx.Node]) -> fx.Node:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), nodes.__getitem__)
    return r.builder.call(any_strides(node.target), *args, **kwargs)


@algebra_for(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def flatten(r: Rewriter, node: fx.Node) -> Done | None:
    """Merging the joined dimension with all that follow joins the flattened parts."""
    joined = r.lazy(node.args[0])
    if not isinstance(joined, Joined):
        return None
    shape, out, dim = value(node.args[0]).shape, value(node).shape, joined.dim
    if len(out) != dim + 1 or not equal_shapes(tuple(shape[:dim]), tuple(out[:dim])):
        return None
    if not all(isinstance(s, int) and s > 0 for s in (*shape[1:], *out[1:])):
        return None
    width = int(out[dim]) // int(shape[dim])

    def on(part: fx.Node) -> fx.Node:
        sizes = [r.builder.size(part), *(int(s) for s in shape[1:dim]), -1]
        return r.builder.call(aten.reshape.default, part, sizes)

    result = each(joined, on, dim)
    if joined.columns is not None:
        columns = tuple(tuple((a * width, b * width) for a, b in c) for c in joined.columns)
        result = Joined(result.parts, dim, columns)
    return result, "sunk", "flattens each part of a concatenation"


@algebra_for(aten.slice.Tensor)
def columns(r: Rewriter, node: fx.Node) -> Done | None:
    """Columns of a concatenation that lie in whole parts or in a part of one."""
    joined, named = r.lazy(node.args[0]), named_arguments(node)
    rank = value(node.args[0]).dim()
    everything = named["start"] in (0, None) and named["end"] in (None, ALL) and named["step"] == 1
    if isinstance(joined, (Joined, Grid)) and everything:
        return joined, "sunk", "takes everything"
    if not isinstance(joined, Joined) or named["dim"] % rank != joined.dim or named["step"] != 1:
        return None
    size = sum(joined.sizes)
    start, stop = named["start"] or 0, size if named["end"] is None else named["end"]
    if not (isinstance(start, int) and isinstance(stop, int)):
        return None
    start, stop = (min(max(i + size if i < 0 else i, 0), size) for i in (start, stop))
    return _between(r, joined, start, stop)


@algebra_for(operator.getitem)
def one_of_split(r: Rewriter, node: fx.Node) -> Done | None:
    """The same of ``split`` and ``chunk``."""
    split, i = node.args
    assert isinstance(split, fx.Node) and isinstance(i, int)
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    joined, named = r.lazy(split.args[0]), named_arguments(split)
    if not isinstance(joined, Joined) or named["dim"] % value(node).dim() != joined.dim:
        return None
    sizes = [t.shape[joined.dim] for t in value(split)]
    if not all(isinstance(s, int) for s in sizes):
        return None
    return _between(r, joined, sum(sizes[:i]), sum(sizes[: i + 1]))


def _between(r: Rewriter, joined: Joined, start: int, stop: int) -> Done | None:
    if joined.columns is not None:
        return None
    parts: list[Part] = []
    for part, ((a, b),) in zip(joined.parts, joined.ranges, strict=True):
        first, last = max(start, a) - a, min(stop, b) - a
        if first >= last:
            continue
        source = part.source if isinstance(part, Gathered) else part
        if (first, last) != (0, b - a):
            source = r.builder.call(aten.slice.Tensor, source, joined.dim, first, last)
        parts.append(Gathered(source, part.map, Place()) if isinstance(part, Gathered) else source)
    if not parts:
        return None
    result = parts[0] if len(parts) == 1 else Joined(tuple(parts), joined.dim)
    return result, "sunk", "takes parts of a concatenation"
