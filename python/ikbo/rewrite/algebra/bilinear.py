"""(d) A bilinear form ``u W c`` is the product of ``u W``, once a user, with ``c``."""

from __future__ import annotations

from torch import fx

from ..engine import Done, Rewriter
from ..rules import Place, aten, named_arguments, value
from ..values import Gathered
from .registry import FLOATS, algebra_for

REASON = "a bilinear form: the copied side meets the weight once for each row of its context"


@algebra_for(aten.bilinear.default)
def bilinear(r: Rewriter, node: fx.Node) -> Done | None:
    """``bilinear(x, y, weight [N, I, J], bias)``, x or y copied, in any leading dimensions."""
    named = named_arguments(node)
    x, y, weight, bias = (named[n] for n in ("input1", "input2", "weight", "bias"))
    if value(x).dim() != 2 or not all(r.is_shared(n) for n in (weight, bias) if n is not None):
        return None
    copied = [isinstance(lazy := r.lazy(n), Gathered) and lazy.place.leading for n in (x, y)]
    if copied == [True, False]:
        form = _contracted(r, "bi,oij,bj->bo", [x, weight, y], "bo")
    elif copied == [False, True]:
        form = _contracted(r, "bj,oij,bi->bo", [y, weight, x], "bo")
    else:
        return None
    if form is None:
        return None
    result = form if bias is None else r.builder.call(aten.add.Tensor, form, r.plain(bias))
    return result, "split", REASON


@algebra_for(aten.einsum.default)
def einsum(r: Rewriter, node: fx.Node) -> Done | None:
    """``einsum`` of copied rows, weights and others' rows, all with the rows' index in front."""
    equation, operands = node.args[:2]
    assert isinstance(equation, str) and isinstance(operands, (list, tuple))
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow or "." in equation or len(operands) < 3:
        return None
    form = _contracted(r, f"{inputs}->{output}", list(operands), output)
    return None if form is None else (form, "split", REASON)


def _contracted(r: Rewriter, equation: str, operands: list[object], output: str) -> fx.Node | None:
    """First the copied rows with the weights, then the result with the rest."""
    terms = equation.partition("->")[0].split(",")
    once: list[tuple[str, fx.Node]] = []
    rest: list[tuple[str, fx.Node]] = []
    maps, copied, rows = set(), 0, output[:1]
    for term, n in zip(terms, operands, strict=True):
        assert isinstance(n, fx.Node)
        lazy = r.lazy(n)
        if len(set(term)) != len(term) or value(n).dtype not in FLOATS:
            return None
        if isinstance(lazy, Gathered):
            if not lazy.place.leading or term[:1] != rows:
                return None
            maps.add(lazy.map)
            copied += 1
            once.append((term, lazy.source))
        elif r.is_shared(n):
            if rows in term:
                return None
            once.append((term, r.plain(n)))
        else:
            if term[:1] != rows:
                return None
            rest.append((term, r.plain(n)))
    if len(maps) != 1 or copied == len(once) or len(rest) != 1 or not rows:
        return None
    ((term, other),) = rest
    needed = set(term) | set(output)
    kept = rows + "".join(dict.fromkeys(c for t, _ in once for c in t if c in needed - {rows}))
    b = r.builder
    part = b.call(aten.einsum.default, f"{','.join(t for t, _ in once)}->{kept}",
                  [n for _, n in once])  # fmt: skip
    read = b.node_of(Gathered(part, maps.pop(), Place()))
    if not set(term) <= set(kept) or output != "".join(c for c in kept if c in output):
        return b.call(aten.einsum.default, f"{kept},{term}->{output}", [read, other])
    # Nothing of the other side's own is kept: a product element by element and a sum, which a
    # compiler reads through the map.
    order = [term.index(c) for c in kept if c in term]
    other = b.call(aten.permute.default, other, order) if order != sorted(order) else other
    for i, c in enumerate(kept):
        if c not in term:
            other = b.call(aten.unsqueeze.default, other, i)
    product = b.call(aten.mul.Tensor, read, other)
    summed = [i for i, c in enumerate(kept) if c not in output]
    return b.call(aten.sum.dim_IntList, product, summed) if summed else product
