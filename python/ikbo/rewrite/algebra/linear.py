"""(b), (c): a linear map over a concatenation of different rows is the sum of maps of its parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from ..engine import Done, Rewriter
from ..rules import Place, aten, named_arguments, same, value
from ..values import Gathered, Joined, Part, Range, RowMap
from . import registry
from .attention import attended
from .forms import REASON, bilinear_parts, form_of, is_thin
from .registry import algebra_for, cand_to_user, ikbo, may_split

LINEAR = "a linear map over a concatenation is the sum of linear maps of its parts"
# concat_linear's kernel takes no fewer: beside a form, which a compiler reads through the map and
# adds, it adds the parts of scores, too.
FEWEST_COLUMNS = 8
# How many times the columns that are taken may those be of which they are.
MOST_SPREAD = 1.5
STACKED = "a product over stacked rows is the sum of the products of its parts"


@dataclasses.dataclass(frozen=True)
class _Term:
    """``sign * x``, read through ``map``, meets these columns of the weight."""

    x: fx.Node
    map: RowMap | None
    sign: int
    columns: tuple[Range, ...]


@dataclasses.dataclass(frozen=True)
class Half:
    """Terms of one batch side by side, and their columns of the weight."""

    x: fx.Node
    weight: fx.Node
    map: RowMap | None
    width: int


@algebra_for(aten.linear.default)
def linear(r: Rewriter, node: fx.Node) -> Done | None:
    """``linear(cat(...))`` along the last dimension."""
    named = named_arguments(node)
    x, weight, bias = named["input"], named["weight"], named["bias"]
    if not may_split(r, weight, bias) or value(x).dtype != value(weight).dtype:
        return None
    joined = _joined(r, x, value(x).dim() - 1, is_thin(weight))
    if joined is None:
        return None
    return _split(r, node, joined, r.plain(weight), None if bias is None else r.plain(bias))


@algebra_for(aten.addmm.default, aten.mm.default)
def addmm(r: Rewriter, node: fx.Node) -> Done | None:
    """The same as ATen's core ops write it: ``x @ w.t()``, and addmm with a bias."""
    named = named_arguments(node)
    x, weight = named.get("mat1", named["self"]), named["mat2"]
    bias = named["self"] if node.target is aten.addmm.default else None
    if not may_split(r, weight, bias) or value(x).dtype != value(weight).dtype:
        return None
    if named.get("beta", 1) != 1 or named.get("alpha", 1) != 1:
        return None
    if bias is not None and (
        value(bias).dim() != 1 or not same(value(bias).shape[0], value(weight).shape[1])
    ):
        return None
    transposed = r.builder.call(aten.permute.default, r.plain(weight), [1, 0])
    joined = _joined(r, x, 1, is_thin(transposed))
    if joined is None:
        return None
    return _split(r, node, joined, transposed, None if bias is None else r.plain(bias))


@algebra_for(aten.matmul.default)
def matmul(r: Rewriter, node: fx.Node) -> Done | None:
    """``cat(...) @ w`` along the last dimension, ``w @ cat(...)`` along the stacked one."""
    left, right = node.args[:2]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    done = attended(r, node)
    if done is not None:
        return done
    if value(right).dim() == 2 and may_split(r, right):
        joined = _joined(r, left, value(left).dim() - 1)
        if joined is None or value(left).dtype != value(right).dtype:
            return None
        transposed = r.builder.call(aten.permute.default, r.plain(right), [1, 0])
        return _split(r, node, joined, transposed, None)
    return _compressed(r, node, left, right)


@algebra_for(aten.einsum.default)
def compression(r: Rewriter, node: fx.Node) -> Done | None:
    """``einsum("mk,bkn->bmn", weight, stacked)``, by any letters and in either order."""
    equation, operands = node.args[:2]
    assert isinstance(equation, str) and isinstance(operands, (list, tuple))
    left, _, out = equation.replace(" ", "").partition("->")
    terms = list(zip(left.split(","), operands, strict=True))
    if len(terms) != 2 or sorted(len(t) for t, _ in terms) != [2, 3]:
        return None
    (w, weight), (e, x) = sorted(terms, key=lambda t: len(t[0]))
    if len(set(w + e)) != 4 or w[1] != e[1] or out != e[0] + w[0] + e[2]:
        return None
    assert isinstance(weight, fx.Node) and isinstance(x, fx.Node)
    return _compressed(r, node, weight, x)


def _joined(r: Rewriter, x: fx.Node, dim: int, thin: bool = False) -> Joined | None:
    """The concatenation along ``dim`` that x is; a sum of different rows counts as one."""
    lazy = r.lazy(x)
    if isinstance(lazy, Joined):
        return lazy if lazy.dim == dim else None
    if not isinstance(lazy, fx.Node):
        return None
    parts = parts_of(lazy, dim)
    if thin and len(parts) == 1 and not form_of(r, lazy):
        return None  # to add up rows before a thin map is the quicker
    if any(form_of(r, part) or any(isinstance(s, Gathered) for s, _ in _summands(r, part, dim))
           for part in parts):  # fmt: skip
        return Joined(tuple(parts), dim)
    return None


def parts_of(x: fx.Node, dim: int) -> list[fx.Node]:
    """What x is a concatenation of, also by several."""
    rank = value(x).dim()
    if x.target is not aten.cat.default or (*x.args[1:], 0)[0] not in (dim, dim - rank):
        return [x]
    parts = [n for n in x.all_input_nodes if value(n).dim() == rank]
    if parts != x.args[0]:
        return [x]  # one of them twice, or empty ones, which cat skips
    return [part for n in parts for part in parts_of(n, dim)]


def _summands(r: Rewriter, node: fx.Node, dim: int, sign: int = 1) -> list[tuple[Part, int]]:
    """``node`` as a signed sum, if it is an element-wise sum in which copied rows take part.

    Its terms may repeat along dimensions other than ``dim``.
    """
    copied = r.builder.copy_of(node)
    if copied is not None and copied.place.leading:
        return [(copied, sign)]
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
        terms: list[tuple[Part, int]] = []
        for n, s in zip(node.args, (1, -1 if node.target is aten.sub.Tensor else 1), strict=False):
            if not isinstance(n, fx.Node) or value(n).dim() != value(node).dim():
                return [(node, sign)]
            if not same(value(n).shape[dim], value(node).shape[dim]):
                return [(node, sign)]
            if value(n).dtype != value(node).dtype:
                return [(node, sign)]
            terms += _summands(r, n, dim, sign * s)
        # A term that reads copied rows itself, such as a product, is no cheaper on its own.
        reads = [t for t, _ in terms if isinstance(t, fx.Node)
                 and any(r.builder.copy_of(n) for n in t.all_input_nodes)]  # fmt: skip
        if len(node.args) == 2 and not reads and any(isinstance(t, Gathered) for t, _ in terms):
            return terms
    return [(node, sign)]


def _terms(r: Rewriter, joined: Joined) -> list[_Term]:
    terms: list[_Term] = []
    for part, columns in zip(joined.parts, joined.ranges, strict=True):
        summands = [(part, 1)] if isinstance(part, Gathered) else _summands(r, part, joined.dim)
        for summand, sign in summands:
            if isinstance(summand, Gathered):
                terms.append(_Term(summand.source, summand.map, sign, columns))
            else:
                terms.append(_Term(summand, None, sign, columns))
    return terms


def _narrowed(terms: list[_Term], dim: int) -> list[_Term]:
    """Candidates' terms that repeat along another dimension, without the repetition."""
    result = []
    for term in terms:
        x = term.x
        while term.map is None and x.target is aten.expand.default:
            source = x.args[0]
            assert isinstance(source, fx.Node)
            if value(source).dim() != value(x).dim() or not same(
                value(source).shape[dim], value(x).shape[dim]
            ):
                break
            x = source
        result.append(dataclasses.replace(term, x=x))
    return result


def _halves(r: Rewriter, joined: Joined, weight: fx.Node) -> tuple[list[Half], list[Half]]:
    """The candidates' halves, one for each shape, and one for each map, the widest first."""
    terms = _terms(r, joined)
    rank = value(terms[0].x).dim()
    if any(t.map is not None for t in terms) and rank > 2:
        terms = _narrowed(terms, joined.dim)
    groups: dict[object, list[_Term]] = {}
    for term in terms:
        shape = tuple(str(s) for d, s in enumerate(value(term.x).shape) if d != joined.dim)
        groups.setdefault((term.map, shape), []).append(term)
    halves = [_half(r, group, joined.dim, weight) for group in groups.values()]
    own = sorted((h for h in halves if h.map is None), key=lambda h: -_rows(h.x, joined.dim))
    read = sorted((h for h in halves if h.map is not None), key=lambda h: -h.width)
    return own, read


def _rows(x: fx.Node, dim: int) -> int:
    """How many dimensions beside ``dim`` aren't 1."""
    return sum(not same(s, 1) for d, s in enumerate(value(x).shape) if d != dim)


def _half(r: Rewriter, terms: list[_Term], dim: int, weight: fx.Node) -> Half:
    """The terms joined; what occurs several times meets the sum of its columns."""
    by_x: dict[fx.Node, list[_Term]] = {}
    for term in terms:
        by_x.setdefault(term.x, []).append(term)
    nodes, weights, width = list(by_x), [], 0
    plain: list[Range] = []
    for i, same_x in enumerate(by_x.values()):
        width += sum(b - a for a, b in same_x[0].columns)
        alone = len(same_x) == 1 and same_x[0].sign == 1
        spread = _spread(r, same_x[0], weight) if alone else None
        if alone and spread is None:
            plain += same_x[0].columns
            continue
        if plain:
            weights.append(_columns(r, weight, plain))
        plain = []
        if spread is None:
            weights.append(_weight_sum(r, weight, same_x))
        else:
            nodes[i], its = spread
            weights.append(its)
    if plain:
        weights.append(_columns(r, weight, plain))
    x = r.builder.cat(nodes, dim)
    its = r.builder.cat(weights, 1)
    return Half(x, its, terms[0].map, width)


def _spread(r: Rewriter, term: _Term, weight: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What a term takes columns of, and a weight for all of those: zero where one isn't taken.

    To take columns is a kernel that reads and writes the rows; a weight's are fewer.
    """
    x = term.x
    if term.map is not None or x.target is not aten.index_select.default or x.args[1] != 1:
        return None
    side, _, index = x.args
    assert isinstance(side, fx.Node) and isinstance(index, fx.Node)
    known, width, device = r.new_constants.get(index), value(side).shape[-1], value(x).device
    if known is None or value(side).dim() != 2 or not registry.counts_launches(device):
        return None
    if len(known.unique()) < len(known) or not width <= MOST_SPREAD * len(known):
        return None
    places = torch.zeros(width, dtype=torch.int64, device=device)
    left_out = torch.ones(width, dtype=torch.bool, device=device)
    places[known] = torch.cat([torch.arange(a, b, device=device) for a, b in term.columns])
    left_out[known] = False
    call = r.builder.call
    spread = call(aten.index_select.default, weight, 1, r.new_constant(places))
    return side, call(aten.masked_fill.Scalar, spread, r.new_constant(left_out), 0)


def _weight_sum(r: Rewriter, weight: fx.Node, terms: list[_Term]) -> fx.Node:
    result: fx.Node | None = None
    for term in sorted(terms, key=lambda t: -t.sign):
        columns = _columns(r, weight, list(term.columns))
        if result is None:
            result = columns if term.sign > 0 else r.builder.call(aten.neg.default, columns)
        else:
            op = aten.add.Tensor if term.sign > 0 else aten.sub.Tensor
            result = r.builder.call(op, result, columns)
    assert result is not None
    return result


def _columns(r: Rewriter, weight: fx.Node, ranges: list[Range]) -> fx.Node:
    """Columns of the weight: a view, where they lie together."""
    merged: list[Range] = []
    for a, b in ranges:
        if merged and merged[-1][1] == a:
            merged[-1] = (merged[-1][0], b)
        else:
            merged.append((a, b))
    if merged == [(0, value(weight).shape[1])]:
        return weight
    views = [r.builder.call(aten.slice.Tensor, weight, 1, a, b) for a, b in merged]
    return r.builder.cat(views, 1)


def _split(
    r: Rewriter, node: fx.Node, joined: Joined, weight: fx.Node, bias: fx.Node | None
) -> Done | None:
    b, dim, rank, fused = r.builder, joined.dim, value(node).dim(), ""
    forms, rest = bilinear_parts(r, joined, weight) if rank == 2 else ([], joined)
    own, contexts = _halves(r, rest, weight) if rest is not None else ([], [])
    if not contexts and not forms:
        return None
    pieces: list[fx.Node] = []
    if own and contexts and _rows(own[0].x, dim) == rank - 1:
        first = contexts[0]
        assert first.map is not None
        maps = (cand_to_user(r, first.map), None, None)
        if rank == 2 and not (forms and value(weight).shape[0] < FEWEST_COLUMNS):
            fused, (x, *own), (_, *contexts) = "concat_linear", own, contexts
            x, first = in_whole_bytes(r, x, first)
            pieces.append(b.call(ikbo.concat_linear.default, x.x, first.x, x.weight,
                                 first.weight, bias, *maps))  # fmt: skip
            bias = None
        elif rank == 3 and _transposed(own[0].x) and _transposed(first.x):
            # Along the stacked axis, written as linear(stacked.mT).mT.
            fused, (x, *own), (_, *contexts) = "linear_compression", own, contexts
            rows = [b.call(aten.permute.default, h.x, [0, 2, 1]) for h in (x, first)]
            product = b.call(ikbo.linear_compression.default, *rows, x.weight, first.weight,
                             bias, *maps)  # fmt: skip
            pieces.append(b.call(aten.permute.default, product, [0, 2, 1]))
            bias = None
    for half in (*own, *contexts):
        part = b.call(aten.linear.default, half.x, half.weight, bias)
        bias = None
        pieces.append(part if half.map is None else b.node_of(Gathered(part, half.map, Place())))
    pieces += forms if bias is None else [*forms, bias]
    result = _sum(r, pieces)
    if not _same_shape(result, node):
        return None
    reason = f"{LINEAR}; {REASON}" if forms else LINEAR
    return result, f"replaced by {fused}" if fused else "split", reason


def in_whole_bytes(r: Rewriter, x: Half, first: Half) -> tuple[Half, Half]:
    """The halves with zeros behind their columns, so that rows begin at multiples of 16 bytes.

    concat_linear's kernels take half precision in such rows only. Both parts of the weight lie in
    one matrix, made by one kernel or, where constants are folded, by none.
    """
    halves, call = (x, first), r.builder.call
    gaps = [-value(h.x).shape[1] % 8 for h in halves]
    dtype, on = value(x.x).dtype, value(x.x).device
    if dtype not in (torch.bfloat16, torch.float16) or not any(gaps):
        return x, first

    def widened(node: fx.Node, gap: int) -> list[fx.Node]:
        zeros = call(aten.full.default, [r.builder.size(node), gap], 0, dtype=dtype, device=on)
        joined = node.target is aten.cat.default and (*node.args[1:], 0)[0] == 1
        parts: Any = node.args[0] if joined else [node]
        return [*parts, zeros] if gap else [*parts]

    def wide(half: Half, gap: int) -> list[fx.Node]:
        return [r.builder.together(n) for n in widened(half.weight, gap)]

    both = [n for h, gap in zip(halves, gaps, strict=True) for n in wide(h, gap)]
    weight, begin, result = call(aten.cat.default, both, 1), 0, []
    for half, gap in zip(halves, gaps, strict=True):
        end = begin + value(half.x).shape[1] + gap
        its = call(aten.slice.Tensor, weight, 1, begin, end)
        rows = call(aten.cat.default, widened(half.x, gap), 1) if gap else half.x
        result.append(dataclasses.replace(half, x=rows, weight=its))
        begin = end
    return result[0], result[1]


def _sum(r: Rewriter, pieces: list[fx.Node]) -> fx.Node:
    result = pieces[0]
    for piece in pieces[1:]:
        result = r.builder.call(aten.add.Tensor, result, piece)
    return result


def _same_shape(new: fx.Node, old: fx.Node) -> bool:
    a, b = value(new).shape, value(old).shape
    return len(a) == len(b) and all(
        same(x, y) or (not (isinstance(x, int) and isinstance(y, int)) and not same(x, 1))
        for x, y in zip(a, b, strict=True)
    )


def _transposed(x: fx.Node) -> bool:
    """Whether x is the transpose of something, or a concatenation of such."""
    if x.target is aten.cat.default:
        parts = x.args[0]
        assert isinstance(parts, (list, tuple))
        return all(isinstance(p, fx.Node) and _transposed(p) for p in parts)
    if x.target is aten.transpose.int:
        return {d % 3 for d in x.args[1:] if isinstance(d, int)} == {1, 2}
    return x.target is aten.permute.default and x.args[1] == [0, 2, 1]


def _compressed(r: Rewriter, node: fx.Node, weight: fx.Node, x: fx.Node) -> Done | None:
    """``weight [M, K] @ stacked [rows, K, N]``."""
    joined = r.lazy(x)
    if not isinstance(joined, Joined) or value(x).dim() != 3 or joined.dim != 1:
        return None
    if not may_split(r, weight) or value(weight).dtype != value(x).dtype:
        return None
    b = r.builder
    own, contexts = _halves(r, joined, r.plain(weight))
    if not contexts:
        return None
    pieces, action = [], "split"
    if own and _rows(own[0].x, 1) == 2:
        (full, *own), (first, *contexts) = own, contexts
        assert first.map is not None
        maps = (cand_to_user(r, first.map), None, None)
        pieces.append(b.call(ikbo.linear_compression.default, full.x, first.x, full.weight,
                             first.weight, None, *maps))  # fmt: skip
        action = "replaced by linear_compression"
    for half in (*own, *contexts):
        part = b.call(aten.matmul.default, half.weight, half.x)
        pieces.append(part if half.map is None else b.node_of(Gathered(part, half.map, Place())))
    result = _sum(r, pieces)
    return (result, action, STACKED) if _same_shape(result, node) else None
