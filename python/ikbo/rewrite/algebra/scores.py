"""Linears with few columns over element-wise joins, so that nothing puts the joins together.

A concatenation of joins is one kernel that makes all of them, element by element, several times
slower than one for each (139 against 50 us for 4096 rows of DCNv2's). So each meets its columns by
itself; with one column it is a sum, and isn't stored either.

Where a join is ``base * (W x + b)``, as a cross of features is, the sum ``w . (base * (W x + b))``
is ``x . (W' diag(w) base) + (w * b) . base``: linear maps of the base, narrow if W is thin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from ..engine import KEEPING, Done, Rewriter, equal_shapes
from ..rules import argument, aten, named_arguments, value
from ..values import Gathered, Part
from . import registry
from .forms import is_thin, linear_map
from .linear import Half, in_whole_bytes, parts_of
from .registry import algebra_for, cand_to_user, ikbo

PARTS = "a Linear with few columns over element-wise joins: one of each, not put together"
SUMS = "a Linear with one column: a sum, in the kernel that joins what it adds up"
NARROW = "a Linear with one column over products with thin maps: narrow maps of their other factor"
MOST_TERMS = 64
FEW = 8  # columns are few if they are at most this part of those that they are summed over


@dataclasses.dataclass(frozen=True)
class _Term:
    """``base``, ``base * factor`` or ``base * (x @ weight.T)``: [B, K].

    Attributes:
        factor: [K].
        weight: [K, q].
    """

    base: Part
    factor: fx.Node | None = None
    x: fx.Node | None = None
    weight: fx.Node | None = None


@algebra_for(aten.linear.default, aten.addmm.default, aten.mm.default)
def over_joins(r: Rewriter, node: fx.Node) -> Done | None:
    """``linear(cat(joins))`` to few columns, on a GPU only.

    With one column sums are kept in float32 (float64 for float64) and the result is rounded once.
    """
    if not registry.counts_launches(value(node).device) or value(node).dim() != 2:
        return None
    named = named_arguments(node)
    x = r.lazy(named["input" if "input" in named else "mat1" if "mat1" in named else "self"])
    made = r.as_it_is(node) if isinstance(x, fx.Node) else None
    found = linear_map(r, made) if isinstance(made, fx.Node) else None
    if found is None:
        return None
    x, weight, bias = found
    n, k = value(weight).shape
    parts = _with_columns(r, x, weight)
    if FEW * n > k or not any(_joins_copies(r, part) for part, _ in parts):
        return None
    if n > 1:
        pieces = [r.builder.call(aten.linear.default, *part) for part in parts]
        return _added(r, pieces, bias), "split", PARTS
    pieces, rest = _narrow(r, parts)
    reason = NARROW if pieces else SUMS
    pieces += [_sum_of(r, part, columns) for part, columns in rest]
    total = _added(r, pieces, bias)
    return r.builder.call(aten._to_copy.default, total, dtype=value(x).dtype), "split", reason


def _added(r: Rewriter, pieces: list[fx.Node], bias: fx.Node | None) -> fx.Node:
    total, *rest = pieces if bias is None else [*pieces, bias]
    for piece in rest:
        total = r.builder.call(aten.add.Tensor, total, piece)
    return total


def _with_columns(r: Rewriter, x: fx.Node, weight: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """What x is a concatenation of, each with its columns of the weight."""
    result, begin = [], 0
    for part in parts_of(x, 1):
        end = begin + value(part).shape[1]
        result.append((part, r.builder.call(aten.slice.Tensor, weight, 1, begin, end)))
        begin = end
    return result


def _sum_of(r: Rewriter, a: fx.Node, b: fx.Node) -> fx.Node:
    """[B, 1]: the sums of a * b's rows."""
    dtype = torch.float64 if value(a).dtype is torch.float64 else torch.float32
    product = r.builder.call(aten.mul.Tensor, a, b)
    return r.builder.call(aten.sum.dim_IntList, product, [1], True, dtype=dtype)


def _joins_copies(r: Rewriter, node: fx.Node) -> bool:
    """Whether element-wise ops, and no others, lead from copied rows to a value."""
    seen, left = set[fx.Node](), [node]
    while left:
        n = left.pop()
        if r.builder.copy_of(n) is not None:
            return True
        if n.target in KEEPING and n not in seen:
            left += n.all_input_nodes
        seen.add(n)
    return False


def _narrow(
    r: Rewriter, parts: list[tuple[fx.Node, fx.Node]]
) -> tuple[list[fx.Node], list[tuple[fx.Node, fx.Node]]]:
    """The sums of products with thin maps and their bases, and what else is to be added up."""
    rest: list[tuple[fx.Node, fx.Node]] = []
    terms: list[tuple[_Term, fx.Node]] = []
    for part, columns in parts:
        its = _terms(r, part)
        if any(t.x is not None for t in its):
            terms += [(t, columns) for t in its]
        else:
            rest.append((part, columns))
    bases = {t.base for t, _ in terms if t.x is not None}
    found = [(t, columns) for t, columns in terms if t.base in bases]
    rest += [(r.builder.node_of(t.base), columns) for t, columns in terms if t.base not in bases]
    maps = {t.base.map for t, _ in found if isinstance(t.base, Gathered)}
    own = list(dict.fromkeys(t.base for t, _ in found if isinstance(t.base, fx.Node)))
    copied = list(dict.fromkeys(t.base for t, _ in found if isinstance(t.base, Gathered)))
    if len(maps) != 1 or not own:
        return [], parts
    call, (rows,) = r.builder.call, maps
    inputs = list(dict.fromkeys(t.x for t, _ in found if t.x is not None))
    widths = [value(x).shape[1] for x in inputs]

    def half(bases: Sequence[Part]) -> Half:
        nodes = [b.source if isinstance(b, Gathered) else b for b in bases]
        weights = [_weight_of(r, b, found, inputs) for b in bases]
        x = r.builder.cat(nodes, 1)
        weight = r.builder.cat(weights, 1)
        return Half(x, weight, rows, value(x).shape[1])

    x, first = in_whole_bytes(r, half(own), half(copied))
    maps_of_op = (cand_to_user(r, rows), None, None)
    product = call(ikbo.concat_linear.default, x.x, first.x, x.weight, first.weight, None,
                   *maps_of_op)  # fmt: skip
    pieces, begin = [], 0
    for n, width in zip(inputs, widths, strict=True):
        pieces.append(_sum_of(r, n, call(aten.slice.Tensor, product, 1, begin, begin + width)))
        begin += width
    return [*pieces, call(aten.slice.Tensor, product, 1, begin, begin + 1)], rest


def _weight_of(
    r: Rewriter, base: Part, found: list[tuple[_Term, fx.Node]], inputs: list[fx.Node]
) -> fx.Node:
    """What a base meets, [rows, K]: ``weight.T diag(columns)`` of each input's terms, and below
    them the columns times the factors; rows of zeros make their number a multiple of 8."""
    call = r.builder.call
    rows: list[fx.Node] = []
    its = [(t, columns) for t, columns in found if t.base == base]
    columns = its[0][1]
    like = {"dtype": value(columns).dtype, "device": value(columns).device}
    width = value(columns).shape[1]

    def added(nodes: list[fx.Node], height: int) -> fx.Node:
        zeros = call(aten.full.default, [height, width], 0, **like)
        return _added(r, nodes, None) if nodes else zeros

    for x in inputs:
        turned = [call(aten.mul.Tensor, call(aten.permute.default, t.weight, [1, 0]), c)
                  for t, c in its if t.x is x]  # fmt: skip
        rows.append(added(turned, value(x).shape[1]))
    last = [c if t.factor is None else call(aten.mul.Tensor, c, t.factor)
            for t, c in its if t.x is None]  # fmt: skip
    rows.append(added(last, 1))
    height = sum(value(row).shape[0] for row in rows)
    if -height % 8:
        rows.append(call(aten.full.default, [-height % 8, width], 0, **like))
    return call(aten.cat.default, rows, 0)


def _terms(r: Rewriter, node: fx.Node) -> list[_Term]:
    """``node`` as a sum of terms; itself, where it is no such sum."""
    copied = r.builder.copy_of(node)
    if copied is not None and copied.place.leading:
        return [_Term(copied)]
    plain = len(node.args) == 2 and not node.kwargs and all(
        isinstance(n, fx.Node) and equal_shapes(tuple(value(n).shape), tuple(value(node).shape))
        and value(n).dtype == value(node).dtype
        for n in node.args
    )  # fmt: skip
    if not plain or node.target not in (aten.add.Tensor, aten.mul.Tensor):
        return [_Term(node)]
    a, b = (argument(node, i) for i in range(2))
    if node.target is aten.mul.Tensor:
        return _times(r, a, b) or _times(r, b, a) or [_Term(node)]
    left = _terms(r, a)
    both = [*left, *(left if b is a else _terms(r, b))]
    return both if len(both) <= MOST_TERMS else [_Term(node)]


def _times(r: Rewriter, base: fx.Node, other: fx.Node) -> list[_Term]:
    """The terms of ``base * other``, if other is a thin linear map."""
    found = linear_map(r, other)
    if found is None or not is_thin(found[1]):
        return []
    x, weight, bias = found
    copied = r.builder.copy_of(base)
    of = copied if copied is not None and copied.place.leading else base
    terms = [_Term(of, x=x, weight=weight)]
    return terms if bias is None else [*terms, _Term(of, factor=bias)]
