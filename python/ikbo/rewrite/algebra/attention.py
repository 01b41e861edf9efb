"""(e) Softmax attention over copied keys and values becomes `candidate_attention`."""

from __future__ import annotations

from torch import fx

from ..engine import Done, Rewriter, equal_shapes
from ..rules import aten, named_arguments, same, value
from ..values import Gathered, Lazy, shape_of
from .registry import FLOATS, algebra_for, ikbo, map_arguments


@algebra_for(aten.scaled_dot_product_attention.default)
def attention(r: Rewriter, node: fx.Node) -> Done | None:
    named = named_arguments(node)
    if named["attn_mask"] is not None or named["dropout_p"] != 0 or named["is_causal"]:
        return None
    q, k, v = (r.lazy(named[n]) for n in ("query", "key", "value"))
    heads = value(named["query"]).shape[-3], value(named["key"]).shape[-3]
    if not same(*heads) and not named.get("enable_gqa"):
        return None
    return _candidate_attention(r, named["query"], q, k, v, named["scale"])


def _candidate_attention(
    r: Rewriter, query: fx.Node, q: Lazy, k: Lazy, v: Lazy, scale: float | None
) -> Done | None:
    """q [B, H, S, D] with k, v [U, Hk, L, D] read through one map."""
    if not isinstance(q, fx.Node) or not isinstance(k, Gathered) or not isinstance(v, Gathered):
        return None
    if k.map != v.map or not (k.place.leading and v.place.leading):
        return None
    if not same(value(query).shape[0], value(k.map.node).shape[0]):
        return None
    if any(value(n).dim() != 4 or value(n).dtype != value(query).dtype
           for n in (query, k.source, v.source)):  # fmt: skip
        return None
    if value(query).dtype not in FLOATS or not same(shape_of(k)[1], shape_of(v)[1]):
        return None
    b = r.builder
    rows = [b.call(aten.permute.default, n, [0, 2, 1, 3]) for n in (q, k.source, v.source)]
    maps = map_arguments(r, k.map)
    out = b.call(ikbo.candidate_attention.default, *rows, None, None, *maps, scale)
    reason = "softmax attention over copied keys and values reads them through the map"
    return (
        b.call(aten.permute.default, out, [0, 2, 1, 3]),
        "replaced by candidate_attention",
        reason,
    )


def attended(r: Rewriter, node: fx.Node) -> Done | None:
    """softmax(q @ k.mT * scale, -1) @ v, written by hand."""
    weights, v = node.args[:2]
    assert isinstance(weights, fx.Node)
    if weights.target is not aten.softmax.int or value(weights).dim() != 4:
        return None
    named = named_arguments(weights)
    if named["dim"] not in (-1, 3) or named["dtype"] is not None:
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
    if transposed.target is not aten.transpose.int or value(transposed).dim() != 4:
        return None
    if {d % 4 for d in transposed.args[1:]} != {2, 3}:
        return None
    key = transposed.args[0]
    if not equal_shapes(tuple(value(key).shape[:2]), tuple(value(query).shape[:2])):
        return None
    return _candidate_attention(r, query, r.lazy(query), r.lazy(key), r.lazy(v), scale)
