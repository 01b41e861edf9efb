"""(d) A linear map of copied rows times a thin linear map of others' rows is a bilinear form.

``W (u * (V x))`` is ``(W diag(u) V) x``: the small matrix in brackets is of the context. Layers
that cross features (DCNv2's of low rank), gates and modulations are such products and their sums.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from ..engine import Rewriter, equal_shapes
from ..rules import Place, aten, value
from ..values import Gathered, Joined, Part, Range, RowMap
from . import registry
from .registry import FLOATS

REASON = "copied rows times a thin linear map: a bilinear form, its matrix once for each of them"
# A matrix [q, n] of each context's row costs it K q n, and saves K (q + n) for each copy: it's made
# only where as few copies pay for it. More are the rule where a context is worth its name.
COPIES_THAT_PAY = 32
MOST_PRODUCTS = 16


@dataclasses.dataclass(frozen=True)
class Product:
    """``source * (x @ weight.T)``, [B, K], or ``source`` by itself.

    Attributes:
        source: [U, K], its rows read through ``map``.
        x: [B, q], or None.
        weight: [K, q], or None.
    """

    source: fx.Node
    map: RowMap
    x: fx.Node | None = None
    weight: fx.Node | None = None


Form = list[Product]  # their sum


def bilinear_parts(
    r: Rewriter, joined: Joined, weight: fx.Node
) -> tuple[list[fx.Node], Joined | None]:
    """``weight @ part`` of the parts that are such products, and what is left of the concatenation.

    Of a part itself stays what is of the context alone.
    """
    made: list[fx.Node] = []
    parts: list[Part] = []
    columns: list[tuple[Range, ...]] = []
    for part, ranges in zip(joined.parts, joined.ranges, strict=True):
        form = form_of(r, part)
        ((begin, end), *others) = ranges
        if others or not form or not _pays(form, weight):
            parts.append(part)
            columns.append(ranges)
            continue
        its = r.builder.call(aten.slice.Tensor, weight, 1, begin, end)
        made.append(_product_of(r, [p for p in form if p.x is not None], its))
        for product in form:
            if product.x is None:
                parts.append(Gathered(product.source, product.map, Place()))
                columns.append(ranges)
    rest = Joined(tuple(parts), joined.dim, tuple(columns)) if parts else None
    return made, rest


def form_of(r: Rewriter, part: Part) -> Form:
    """A part as such a sum; an empty one if it isn't, or all of it is of the context.

    None on a GPU: the matrices of a few users are many small launches, which cost more than the
    candidates' larger products do.
    """
    if not isinstance(part, fx.Node) or value(part).dim() != 2 or value(part).dtype not in FLOATS:
        return []
    if registry.counts_launches(value(part).device):
        return []
    form = _sum(r, part)
    maps = {p.map for p in form}
    return form if len(maps) == 1 and any(p.x is not None for p in form) else []


def columns_of(r: Rewriter, node: fx.Node, dim: int, begin: int, end: int) -> fx.Node:
    """``node[..., begin:end, ...]``: part of a concatenation, or of a thin map's weight."""
    last = value(node).dim() - 1
    if node.target is aten.cat.default and (*node.args[1:], 0)[0] in (dim, dim - last - 1):
        stop, nodes = 0, node.args[0]
        assert isinstance(nodes, (list, tuple))
        for n in nodes:
            assert isinstance(n, fx.Node)
            start, stop = stop, stop + value(n).shape[dim]
            if (start, stop) == (begin, end) and value(n).dim() == last + 1:
                return n
    found = linear_map(r, node) if dim == last else None
    if found is not None and is_thin(found[1], end - begin):
        x, *both = found
        rows = [None if n is None else r.builder.call(aten.slice.Tensor, n, 0, begin, end)
                for n in both]  # fmt: skip
        return r.builder.call(aten.linear.default, x, *rows)
    return r.builder.call(aten.slice.Tensor, node, dim, begin, end)


def is_thin(weight: fx.Node, rows: int | None = None) -> bool:
    """Whether a weight, or so many rows of it, makes twice as many columns as it takes, or more."""
    n, q = value(weight).shape
    return isinstance(n, int) and isinstance(q, int) and 2 * q <= (n if rows is None else rows)


def linear_map(r: Rewriter, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """x [B, q], weight [K, q] and bias [K] of ``x @ weight.T + bias``, also as addmm and mm."""
    if node.target is aten.linear.default:
        x, weight, bias = (*node.args, None)[:3]
    elif node.target in (aten.addmm.default, aten.mm.default) and not node.kwargs:
        *biases, x, right = node.args
        bias = biases[0] if biases else None
        assert isinstance(right, fx.Node)
        weight = r.builder.call(aten.permute.default, right, [1, 0])
    else:
        return None
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    assert bias is None or isinstance(bias, fx.Node)
    sizes = value(weight).shape
    if value(x).dim() != 2 or len(sizes) != 2 or not all(isinstance(s, int) for s in sizes):
        return None
    if bias is not None and not equal_shapes(tuple(value(bias).shape), (sizes[0],)):
        return None
    return x, weight, bias


def _pays(form: Form, weight: fx.Node) -> bool:
    n = value(weight).shape[0]
    widths = [value(p.weight).shape[1] for p in form if p.weight is not None]
    return all(isinstance(q, int) and q * n <= COPIES_THAT_PAY * (q + n) for q in widths)


def _sum(r: Rewriter, node: fx.Node) -> Form:
    """``node`` as a sum of products; an empty one if it isn't."""
    copied = r.builder.copy_of(node)
    if copied is not None:
        return [Product(copied.source, copied.map)] if copied.place == Place() else []
    if node.target not in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor) or node.kwargs:
        return []
    a, b = node.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return []
    if not all(equal_shapes(tuple(value(n).shape), tuple(value(node).shape))
               and value(n).dtype == value(node).dtype for n in (a, b)):  # fmt: skip
        return []
    if node.target is aten.mul.Tensor:
        return _times(r, a, b) or _times(r, b, a)
    left, right = _sum(r, a), _sum(r, b)
    if not left or not right:
        return []
    if node.target is aten.sub.Tensor:
        right = [dataclasses.replace(p, source=r.builder.call(aten.neg.default, p.source))
                 for p in right]  # fmt: skip
    return _merged(r, [*left, *right])


def _times(r: Rewriter, of_context: fx.Node, other: fx.Node) -> Form:
    """The product, if one factor is of the context and the other a linear map or such a sum."""
    factors = _sum(r, of_context)
    if len(factors) != 1 or factors[0].x is not None:
        return []
    factor, call = factors[0], r.builder.call
    found = linear_map(r, other)
    if found is not None:
        x, weight, bias = found
        products = [dataclasses.replace(factor, x=x, weight=weight)]
        if bias is not None:
            constant = call(aten.mul.Tensor, factor.source, bias)
            products.append(dataclasses.replace(factor, source=constant))
        return products
    others = _sum(r, other)
    if any(p.map != factor.map for p in others):
        return []
    return [dataclasses.replace(p, source=call(aten.mul.Tensor, factor.source, p.source))
            for p in others]  # fmt: skip


def _merged(r: Rewriter, form: Form) -> Form:
    """What differs in the context's factor only, added up."""
    merged: dict[object, Product] = {}
    for p in form:
        key = (p.map, p.x, p.weight)
        if key in merged:
            total = r.builder.call(aten.add.Tensor, merged[key].source, p.source)
            p = dataclasses.replace(p, source=total)
        merged[key] = p
    return list(merged.values()) if len(merged) <= MOST_PRODUCTS else []


def _product_of(r: Rewriter, form: Form, weight: fx.Node) -> fx.Node:
    """``weight @ (the sum)``: [B, n] of weight [n, K]."""
    call = r.builder.call
    matrices: list[fx.Node] = []
    inputs: list[fx.Node] = []
    for p in form:
        assert p.x is not None and p.weight is not None
        inputs.append(p.x)
        matrices.append(_matrix(r, p.source, p.weight, weight))
    x = r.builder.cat(inputs, 1)
    matrix = r.builder.cat(matrices, 1)
    # Element by element and a sum, which a compiler reads through the map.
    read = r.builder.node_of(Gathered(matrix, form[0].map, Place()))
    product = call(aten.mul.Tensor, read, call(aten.unsqueeze.default, x, 2))
    return call(aten.sum.dim_IntList, product, [1])


def _matrix(r: Rewriter, source: fx.Node, thin: fx.Node, weight: fx.Node) -> fx.Node:
    """``(weight diag(source) thin).T`` of each row: [U, q, n] of thin [K, q] and weight [n, K].

    The source meets the smaller of the two first.
    """
    call = r.builder.call
    rows = call(aten.unsqueeze.default, source, 1)
    turned = call(aten.permute.default, thin, [1, 0])
    if value(weight).shape[0] <= value(thin).shape[1]:
        together = r.builder.together(weight)
        scaled = call(aten.mul.Tensor, rows, together)
        return call(aten.permute.default, call(aten.matmul.default, scaled, thin), [0, 2, 1])
    scaled = call(aten.mul.Tensor, rows, turned)
    return call(aten.matmul.default, scaled, call(aten.permute.default, weight, [1, 0]))
