"""A Linear with one column over element-wise joins: sums, in the kernels that make the joins."""

from __future__ import annotations

import torch
from torch import fx

from ..engine import KEEPING, Done, Rewriter
from ..rules import aten, named_arguments, value
from . import registry
from .forms import linear_map
from .linear import parts_of
from .registry import algebra_for

REASON = "a Linear with one column: a sum, in the kernel that joins what it adds up"


@algebra_for(aten.linear.default, aten.addmm.default, aten.mm.default)
def score(r: Rewriter, node: fx.Node) -> Done | None:
    """``linear(cat(joins))`` to one column, the joins in no memory: on a GPU only.

    Sums are kept in float32 (float64 for float64) and the result is rounded once.
    """
    if not registry.counts_launches(value(node).device) or value(node).dim() != 2:
        return None
    named = named_arguments(node)
    x = r.lazy(named["input" if "input" in named else "mat1" if "mat1" in named else "self"])
    made = r.as_it_is(node) if isinstance(x, fx.Node) else None
    found = linear_map(r, made) if isinstance(made, fx.Node) else None
    if found is None or value(found[1]).shape[0] != 1:
        return None
    x, weight, bias = found
    parts, begin, total = parts_of(x, 1), 0, None
    if not any(_joins_copies(r, part) for part in parts):
        return None
    call, dtype = r.builder.call, value(x).dtype
    in_sums = dtype if dtype is torch.float64 else torch.float32
    for part in parts:
        end = begin + value(part).shape[1]
        its = call(aten.slice.Tensor, weight, 1, begin, end)
        product = call(aten.mul.Tensor, part, its)
        piece = call(aten.sum.dim_IntList, product, [1], True, dtype=in_sums)
        total = piece if total is None else call(aten.add.Tensor, total, piece)
        begin = end
    assert total is not None
    if bias is not None:
        total = call(aten.add.Tensor, total, bias)
    return call(aten._to_copy.default, total, dtype=dtype), "split", REASON


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
