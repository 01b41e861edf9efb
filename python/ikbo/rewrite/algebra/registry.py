"""The table of what may be done with an op beside sinking it, and what its functions share."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..engine import Algebra, Rewriter
from ..rules import aten, value
from ..values import RowMap

ikbo = torch.ops.ikbo
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

ALGEBRA: dict[Any, list[Algebra]] = {}


def algebra_for(*targets: Any) -> Callable[[Algebra], Algebra]:
    """Registers a function for ops, or their names; the first that applies is taken."""

    def register(function: Algebra) -> Algebra:
        for target in targets:
            ALGEBRA.setdefault(target, []).append(function)
        return function

    return register


def counts_launches(device: torch.device) -> bool:
    """Whether how many kernels a program launches is what it costs: on a GPU.

    Rows may be copied there, if that makes one product of several. On a CPU they are copied in
    pieces, so that they stay in the cache and memory's peak low.
    """
    return device.type != "cpu"


def cand_to_user(r: Rewriter, rows: RowMap) -> fx.Node:
    """The map as products take it; they read rows by it and need no groups of candidates."""
    index = rows.node
    if value(index).dtype is not torch.int32:
        index = r.builder.call(aten._to_copy.default, index, dtype=torch.int32)
    return index


def grouped_map(r: Rewriter, rows: RowMap) -> tuple[fx.Node, fx.Node, fx.Node]:
    """cand_to_user, user_offsets and order: candidates grouped, once for the whole program."""
    index = cand_to_user(r, rows)
    grouped = r.builder.call(ikbo.group_candidates.default, index, rows.rows)
    order, offsets = (r.builder.call(operator.getitem, grouped, i) for i in (0, 1))
    return index, offsets, order


def may_split(r: Rewriter, weight: fx.Node, *others: fx.Node | None) -> bool:
    """Whether a weight may be split: shared by all rows, a matrix, in a type the ops take."""
    operands = [n for n in (weight, *others) if n is not None]
    dtypes = {value(n).dtype for n in operands}
    return (
        all(r.is_shared(n) for n in operands)
        and value(weight).dim() == 2
        and len(dtypes) == 1
        and dtypes <= set(FLOATS)
    )
