"""(c) Products among stacked rows split into blocks: FM and dot interactions, Wukong's FM.

Of the rows of users and candidates, stacked ``[u; c]``, the product with their transpose has the
blocks ``u u'`` (once a user), ``u c'`` and ``c c'``; a sum over the stack is the sum of sums.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, fx

from ..engine import Done, Rewriter
from ..rules import Place, aten, named_arguments, same, value
from ..values import Gathered, Grid, Joined, Lazy, Part, Range, RowMap
from . import registry
from .registry import algebra_for

BLOCKS = "a product of stacked rows has a block for each pair of parts"
PAIRS = "takes each pair from its block"
MIXED = "a product of copied rows with rows of others, which no op reads through the map"


@algebra_for(aten.matmul.default, aten.bmm.default)
def product(r: Rewriter, node: fx.Node) -> Done | None:
    """``a @ b`` where a's rows, b's columns, or what is summed over, are stacked."""
    left, right = node.args[:2]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if value(left).dim() != 3 or value(right).dim() != 3:
        return None
    a, b = r.lazy(left), r.lazy(right)
    joined_a, joined_b = (x.dim if isinstance(x, Joined) else 0 for x in (a, b))
    if isinstance(a, Joined) and isinstance(b, Joined) and (a.dim, b.dim) == (2, 1):
        return _summed(r, a, b)
    if joined_a == 2 or joined_b == 1 or joined_a + joined_b == 0:
        return None
    if any(isinstance(x, Joined) and x.columns is not None for x in (a, b)):
        return None
    rows, columns = (_merged(r, x) for x in (a, b))
    if not rows or not columns:
        return None
    symmetric = _transpose_of(a, b)
    launches = registry.counts_launches(value(node).device)
    if launches and len(columns) == 1 and isinstance(columns[0], fx.Node):
        return r.copied(node), "left", MIXED  # one launch
    blocks: dict[tuple[int, int], Part] = {}
    # Others' own rows first: what they make with copied ones is there when it is to be transposed.
    for i in sorted(range(len(rows)), key=lambda i: launches and _is_copied(rows[i])):
        if symmetric and launches and not _is_copied(rows[i]):
            blocks |= {(i, j): block for j, block in enumerate(_line(r, node, rows, i))}
            continue
        for j, column in enumerate(columns):
            if symmetric and (j, i) in blocks:
                blocks[i, j] = _on_source(r, blocks[j, i], aten.permute.default, [0, 2, 1])
            else:
                blocks[i, j] = _block(r, node, rows[i], column, launches)
    lines = [tuple(blocks[i, j] for j in range(len(columns))) for i in range(len(rows))]
    if joined_a and joined_b:
        return Grid(tuple(lines)), "split", BLOCKS
    return Joined(tuple(b for line in lines for b in line), 1 if joined_a else 2), "split", BLOCKS


def _is_copied(part: Part) -> bool:
    return isinstance(part, Gathered)


def _line(r: Rewriter, node: fx.Node, rows: list[Part], i: int) -> list[Part]:
    """The blocks of others' own rows with all rows' transposes: columns of one product.

    Zero rows fill the stack up, so that the product's rows begin at multiples of 16 bytes: others
    are written by kernels an order slower.
    """
    if any(map(_is_copied, rows)):
        r.note("left", node, MIXED)
    call, its = r.builder.call, value(node)
    stops = [0, *itertools.accumulate(_size(row, 1) for row in rows)]
    nodes = [r.builder.node_of(row) for row in rows]
    if gap := -stops[-1] % (16 // its.element_size()):
        zeros = [r.builder.size(nodes[i]), gap, value(nodes[i]).shape[2]]
        nodes.append(call(aten.full.default, zeros, 0, dtype=its.dtype, device=its.device))
    stacked = call(aten.cat.default, nodes, 1)
    own = call(aten.slice.Tensor, stacked, 1, *stops[i : i + 2])
    line = call(aten.matmul.default, own, call(aten.permute.default, stacked, [0, 2, 1]))
    return [call(aten.slice.Tensor, line, 2, *stops[j : j + 2]) for j in range(len(rows))]


def _merged(r: Rewriter, lazy: Lazy) -> list[Part]:
    """The parts, those of the same rows beside each other in one."""
    if isinstance(lazy, Joined):
        groups = itertools.groupby(lazy.parts, lambda p: getattr(p, "map", None))
        merged: list[Part] = []
        for rows, group in groups:
            nodes = [p.source if isinstance(p, Gathered) else p for p in group]
            one = r.builder.cat(nodes, lazy.dim)
            merged.append(one if rows is None else Gathered(one, rows, Place()))
        return merged
    if isinstance(lazy, Gathered):
        return [lazy] if lazy.place.leading else []
    return [lazy] if isinstance(lazy, fx.Node) else []


def _on_source(r: Rewriter, part: Part, op: Any, *args: Any) -> Part:
    if isinstance(part, Gathered):
        return Gathered(r.builder.call(op, part.source, *args), part.map, part.place)
    return r.builder.call(op, part, *args)


def _block(r: Rewriter, node: fx.Node, a: Part, b: Part, launches: bool) -> Part:
    call = r.builder.call
    if isinstance(a, Gathered) and isinstance(b, Gathered) and a.map == b.map:
        return Gathered(call(aten.matmul.default, a.source, b.source), a.map, Place())
    if not isinstance(a, Gathered) and not isinstance(b, Gathered):
        return call(aten.matmul.default, a, b)
    r.note("left", node, MIXED)
    other = r.builder.node_of(b)
    sizes = (*value(other).shape[1:], _shape(a)[1])
    known = all(isinstance(s, int) and s > 0 for s in sizes)
    if isinstance(a, fx.Node) or launches or not known:
        return call(aten.matmul.default, r.builder.node_of(a), other)
    n = sizes[-1]
    step = -(-n // -(-n // min(sizes)))
    pieces = [
        call(aten.matmul.default, r.builder.node_of(Gathered(part, a.map, Place())), other)
        for part in (call(aten.slice.Tensor, a.source, 1, i, min(i + step, n))
                     for i in range(0, n, step))
    ]  # fmt: skip
    return r.builder.cat(pieces, 1)


def _transpose_of(a: Any, b: Any) -> bool:
    """Whether b's parts are the transposes of a's."""
    if not (isinstance(a, Joined) and isinstance(b, Joined)) or len(a.parts) != len(b.parts):
        return False

    def transposed(x: Part, y: Part) -> bool:
        if isinstance(x, Gathered) and isinstance(y, Gathered):
            return x.map == y.map and transposed(x.source, y.source)
        if not (isinstance(x, fx.Node) and isinstance(y, fx.Node)):
            return False
        pairs = ((x, y), (y, x))
        return any(t.target in (aten.transpose.int, aten.permute.default) and t.args[0] is of
                   for of, t in pairs)  # fmt: skip

    return all(transposed(x, y) for x, y in zip(a.parts, b.parts, strict=True))


def _summed(r: Rewriter, a: Joined, b: Joined) -> Done | None:
    """``[u c] @ [v; d]`` is ``u @ v + c @ d``."""
    if a.ranges != b.ranges or len(a.parts) != len(b.parts):
        return None
    total: fx.Node | None = None
    for x, y in zip(a.parts, b.parts, strict=True):
        if isinstance(x, Gathered) != isinstance(y, Gathered):
            return None
        if isinstance(x, Gathered) and isinstance(y, Gathered):
            if x.map != y.map:
                return None
            once = r.builder.call(aten.matmul.default, x.source, y.source)
            piece = r.builder.node_of(Gathered(once, x.map, Place()))
        else:
            piece = r.builder.call(aten.matmul.default, x, y)
        total = piece if total is None else r.builder.call(aten.add.Tensor, total, piece)
    assert total is not None
    return total, "split", "a product over stacked rows is the sum of the products of its parts"


@algebra_for(aten.sum.dim_IntList, aten.mean.dim)
def reduction(r: Rewriter, node: fx.Node) -> Done | None:
    """A sum or mean over the stacked dimension."""
    joined, named = r.lazy(node.args[0]), named_arguments(node)
    rank = value(node.args[0]).dim()
    if not isinstance(joined, Joined) or named["dtype"] is not None or joined.dim == 0:
        return None
    if not named["dim"] or [d % rank for d in named["dim"]] != [joined.dim]:
        return None
    size, total = sum(joined.sizes), None
    for part, its in zip(joined.parts, joined.sizes, strict=True):
        reduced = _on_source(r, part, node.target, [joined.dim], named["keepdim"])
        if node.target is aten.mean.dim:
            reduced = _on_source(r, reduced, aten.mul.Tensor, its / size)
        piece = r.builder.node_of(reduced)
        total = piece if total is None else r.builder.call(aten.add.Tensor, total, piece)
    assert total is not None
    return total, "split", "a sum over stacked rows is the sum of the sums of its parts"


@algebra_for(aten.index.Tensor)
def pairs(r: Rewriter, node: fx.Node) -> Done | None:
    """``grid[:, i, j]`` with indices known now: each pair from its block, in the same order."""
    grid, indices = r.lazy(node.args[0]), named_arguments(node)["indices"]
    if not isinstance(grid, Grid) or len(indices) != 3 or indices[0] is not None:
        return None
    known = [r.constant(i) for i in indices[1:]]
    if any(k is None or k.dim() != 1 or k.dtype is torch.bool for k in known):
        return None
    lines, columns = (k.tolist() for k in known if isinstance(k, Tensor))
    if len(lines) != len(columns) or not lines:
        return None
    heights = [_size(row[0], 1) for row in grid.blocks]
    widths = [_size(block, 2) for block in grid.blocks[0]]
    # The blocks of the same rows side by side, so that their pairs keep the order they had: mostly
    # they meet columns of the next weight that lie together.
    groups: dict[RowMap | None, dict[fx.Node, int]] = {}
    chosen: dict[RowMap | None, list[int]] = {}
    ranges: dict[RowMap | None, list[Range]] = {}
    for at, (line, column) in enumerate(zip(lines, columns, strict=True)):
        (bi, i), (bj, j) = _within(heights, line), _within(widths, column)
        block = grid.blocks[bi][bj]
        rows, (whole, left) = getattr(block, "map", None), _whole(_source(block))
        begins = groups.setdefault(rows, {})
        if whole not in begins:
            begins[whole] = sum(_size(w, 1) * _size(w, 2) for w in begins)
        chosen.setdefault(rows, []).append(begins[whole] + i * _size(whole, 2) + left + j)
        its = ranges.setdefault(rows, [])
        if its and its[-1][1] == at:
            its[-1] = (its[-1][0], at + 1)
        else:
            its.append((at, at + 1))
    parts: list[Part] = []
    for rows, begins in groups.items():
        flat = [r.builder.call(aten.flatten.using_ints, whole, 1, 2) for whole in begins]
        side = r.builder.cat(flat, 1)
        index = r.new_constant(torch.tensor(chosen[rows], device=value(node).device))
        taken = r.builder.call(aten.index_select.default, side, 1, index)
        parts.append(taken if rows is None else Gathered(taken, rows, Place()))
    return Joined(tuple(parts), 1, tuple(map(tuple, ranges.values()))), "split", PAIRS


def _whole(block: fx.Node) -> tuple[fx.Node, int]:
    """The product that a block is columns of, and which column is its first."""
    if block.target is aten.slice.Tensor and block.args[1] == 2:
        whole, _, begin = block.args[:3]
        assert isinstance(whole, fx.Node) and isinstance(begin, int)
        return whole, begin
    return block, 0


def _source(part: Part) -> fx.Node:
    return part.source if isinstance(part, Gathered) else part


@algebra_for(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def flat_grid(r: Rewriter, node: fx.Node) -> Done | None:
    """``grid.flatten(1)``: each line of each block stands in a place of its own."""
    grid = r.lazy(node.args[0])
    shape, out = value(node.args[0]).shape, value(node).shape
    if not isinstance(grid, Grid) or len(out) != 2 or not same(shape[0], out[0]):
        return None
    width, begin = int(shape[2]), 0
    parts: list[Part] = []
    ranges: list[tuple[Range, ...]] = []
    for row in grid.blocks:
        height, left = _size(row[0], 1), 0
        for block in row:
            n = _size(block, 2)
            parts.append(_on_source(r, block, aten.flatten.using_ints, 1, 2))
            starts = [begin + i * width + left for i in range(height)]
            ranges.append(tuple((s, s + n) for s in starts))
            left += n
        begin += height * width
    return Joined(tuple(parts), 1, tuple(ranges)), "split", "flattens each block"


def _size(part: Part, dim: int) -> int:
    return int(_shape(part)[dim])


def _shape(part: Part) -> Any:
    return value(_source(part)).shape


def _within(sizes: list[int], index: int) -> tuple[int, int]:
    """Which of blocks of these sizes an index falls in, and where in it."""
    index += sum(sizes) if index < 0 else 0
    for i, size in enumerate(sizes):
        if index < size:
            return i, index
        index -= size
    raise IndexError("ikbo.rewrite: expected an index within the product that it is taken of.")
