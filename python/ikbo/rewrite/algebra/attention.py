"""(e) Softmax attention over copied keys and values becomes `candidate_attention`."""

from __future__ import annotations

import torch
from torch import fx

from ..engine import Done, Rewriter, equal_shapes
from ..rules import aten, named_arguments, same, value
from ..values import Gathered, Lazy, shape_of
from .registry import FLOATS, algebra_for, grouped_map, ikbo

REASON = "softmax attention over copied keys and values reads them through the map"
VIEWS = (aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.expand.default,
         aten.slice.Tensor, aten.alias.default)  # fmt: skip


@algebra_for(aten.scaled_dot_product_attention.default)
def attention(r: Rewriter, node: fx.Node) -> Done | None:
    """``scaled_dot_product_attention``, without a mask or with one of lengths."""
    named = named_arguments(node)
    if named["dropout_p"] != 0 or named["is_causal"]:
        return None
    q, k, v = (r.lazy(named[n]) for n in ("query", "key", "value"))
    if value(named["query"]).dim() > 3:
        heads = value(named["query"]).shape[-3], value(named["key"]).shape[-3]
        if not same(*heads) and not named.get("enable_gqa"):
            return None
    mask = named["attn_mask"]
    lengths = None if mask is None else _lengths(r, r.lazy(mask), k)
    if mask is not None and lengths is None:
        return None
    return _candidate_attention(r, named["query"], q, k, v, named["scale"], lengths)


def _lengths(r: Rewriter, mask: Lazy, keys: Lazy) -> fx.Node | None:
    """The number of keys of each row, if a mask says ``position < length`` and no more."""
    if not isinstance(mask, Gathered) or not isinstance(keys, Gathered) or mask.map != keys.map:
        return None
    length, source = value(keys.source).shape[-2], mask.source
    shape = value(source).shape
    if not mask.place.leading or not isinstance(length, int) or not same(shape[-1], length):
        return None
    if not all(same(s, 1) for s in shape[1:-1]):
        return None
    compared = _seen_through(source)
    if compared.target is aten.lt.Tensor:
        positions, lengths = compared.args[:2]
    elif compared.target is aten.gt.Tensor:
        lengths, positions = compared.args[:2]
    else:
        return None
    assert isinstance(positions, fx.Node) and isinstance(lengths, fx.Node)
    row = value(positions)
    counted = _seen_through(positions)
    if not same(row.numel(), length) or not same(row.shape[-1], length):
        return None
    if counted.target not in (aten.arange.default, aten.arange.start_step):
        return None
    if counted.target is aten.arange.start_step and (counted.args[0], *counted.args[2:]) not in (
        (0,), (0, 1),
    ):  # fmt: skip
        return None
    column = value(lengths)
    if column.dim() < 2 or not all(same(s, 1) for s in column.shape[1:]):
        return None
    if column.is_floating_point() or counted.kwargs.get("dtype") not in (None, column.dtype):
        return None
    flat = r.builder.call(aten.reshape.default, lengths, [-1])
    within = r.builder.call(aten.clamp.default, flat, 0, length)
    return r.builder.call(aten._to_copy.default, within, dtype=torch.int32)


def _seen_through(node: fx.Node) -> fx.Node:
    """What a node is a view of, with the same elements in the same order."""
    while node.target in VIEWS:
        before = node.args[0]
        assert isinstance(before, fx.Node)
        if not same(value(before).numel(), value(node).numel()):
            break
        node = before
    return node


def _candidate_attention(
    r: Rewriter,
    query: fx.Node,
    q: Lazy,
    k: Lazy,
    v: Lazy,
    scale: float | None,
    lengths: fx.Node | None = None,
) -> Done | None:
    """q [B, H, S, D] with k, v [U, Hk, L, D] read through one map, or all without heads."""
    if not isinstance(q, fx.Node) or not isinstance(k, Gathered) or not isinstance(v, Gathered):
        return None
    if k.map != v.map or not (k.place.leading and v.place.leading):
        return None
    rank = value(query).dim()
    if not same(value(query).shape[0], value(k.map.node).shape[0]) or rank not in (3, 4):
        return None
    if any(value(n).dim() != rank or value(n).dtype != value(query).dtype
           for n in (query, k.source, v.source)):  # fmt: skip
        return None
    if value(query).dtype not in FLOATS or not same(shape_of(k)[1], shape_of(v)[1]):
        return None
    b = r.builder
    if rank == 3:
        rows = [b.call(aten.unsqueeze.default, n, 2) for n in (q, k.source, v.source)]
    else:
        rows = [b.call(aten.permute.default, n, [0, 2, 1, 3]) for n in (q, k.source, v.source)]
    maps = grouped_map(r, k.map)
    out = b.call(ikbo.candidate_attention.default, *rows, None, lengths, *maps, scale)
    back = (
        b.call(aten.select.int, out, 2, 0) if rank == 3
        else b.call(aten.permute.default, out, [0, 2, 1, 3])
    )  # fmt: skip
    return back, "replaced by candidate_attention", REASON


def attended(r: Rewriter, node: fx.Node) -> Done | None:
    """softmax(q @ k.mT * scale, -1) @ v, written by hand."""
    weights, v = node.args[:2]
    assert isinstance(weights, fx.Node)
    rank = value(node).dim()
    if weights.target is not aten.softmax.int or value(weights).dim() != rank:
        return None
    named = named_arguments(weights)
    if named["dim"] not in (-1, rank - 1) or named["dtype"] is not None:
        return None
    scores, scale = named["self"], 1.0
    while scores.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        factor = scores.args[1]
        if not isinstance(factor, (int, float)):
            return None
        scale = scale * factor if "mul" in str(scores.target) else scale / factor
        scores = scores.args[0]
    if scores.target is not aten.matmul.default or len(weights.users) != 1:
        return None
    query, transposed = scores.args[:2]
    if transposed.target is not aten.transpose.int or value(transposed).dim() != rank:
        return None
    if {d % rank for d in transposed.args[1:]} != {rank - 2, rank - 1}:
        return None
    key = transposed.args[0]
    leading = rank - 2
    if not equal_shapes(tuple(value(key).shape[:leading]), tuple(value(query).shape[:leading])):
        return None
    return _candidate_attention(r, query, r.lazy(query), r.lazy(key), r.lazy(v), scale)
