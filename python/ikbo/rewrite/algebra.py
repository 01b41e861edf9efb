"""What may be done with rows of different batches beside sinking: products split over them.

Each function takes the pass and an op and returns the new value with what was done and why, or None
where the algebra doesn't apply; the pass then sinks the op or leaves it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .engine import Algebra, Rewriter, equal_shapes
from .rules import RULES, Place, aten, is_tensor, named_arguments, same, value
from .values import Gathered, Joined, Lazy, RowMap, shape_of

ikbo = torch.ops.ikbo
Done = tuple[Lazy, str, str]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

ALGEBRA: dict[Any, Algebra] = {}


def _for(*targets: Any) -> Callable[[Algebra], Algebra]:
    def register(function: Algebra) -> Algebra:
        ALGEBRA.update(dict.fromkeys(targets, function))
        return function

    return register


# Concatenations stay apart.


@_for(aten.cat.default)
def _cat(r: Rewriter, node: fx.Node) -> Done | None:
    named = named_arguments(node)
    tensors, rank = list(named["tensors"]), value(node).dim()
    if any(value(n).dim() != rank for n in tensors):
        return None  # empty 1-D tensors, which cat skips
    dim = named["dim"] % rank
    parts: list[fx.Node | Gathered] = []
    for n in tensors:
        lazy = r.lazy(n)
        if isinstance(lazy, Joined):
            parts += lazy.parts if lazy.dim == dim else [r.builder.node_of(lazy)]
        else:
            parts.append(lazy)
    maps = {p.map for p in parts if isinstance(p, Gathered)}
    if not maps or (len(maps) == 1 and not any(isinstance(p, fx.Node) for p in parts)):
        return None  # no copies, or all of the same rows: sunk or left as any op
    if dim == 0 or not all(isinstance(p, fx.Node) or p.place.leading for p in parts):
        return None
    if len({value(n).dtype for n in tensors}) != 1:
        return None
    joined = Joined(tuple(parts), dim)
    if not all(isinstance(s, int) for s in joined.sizes):
        return None
    return joined, "deferred", "a concatenation of different rows, made where it must be"


@_for(*(op for op, rule in RULES.items() if rule.reason == "element-wise"
        or op in (aten._to_copy.default, aten.clone.default)))  # fmt: skip
def _elementwise(r: Rewriter, node: fx.Node) -> Done | None:
    fused = _fuse_activation(r, node)
    if fused is not None:
        return fused
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    if len(tensors) != 1 or len(node.all_input_nodes) != 1 or tensors[0] is not node.args[0]:
        return None
    joined = r.lazy(tensors[0])
    if not isinstance(joined, Joined):
        return None

    def on(part: fx.Node) -> fx.Node:
        return r.builder.call(node.target, part, *node.args[1:], **node.kwargs)  # type: ignore[arg-type]

    return _each(joined, on, joined.dim), "sunk", "element-wise, on each part of a concatenation"


def _each(joined: Joined, on: Callable[[fx.Node], fx.Node], dim: int) -> Joined:
    parts = [dataclasses.replace(p, source=on(p.source)) if isinstance(p, Gathered) else on(p)
             for p in joined.parts]  # fmt: skip
    return Joined(tuple(parts), dim)


@_for(aten.transpose.int, aten.permute.default)
def _transpose(r: Rewriter, node: fx.Node) -> Done | None:
    joined = r.lazy(node.args[0])
    if not isinstance(joined, Joined):
        return None
    named, rank = named_arguments(node), value(node).dim()
    if node.target is aten.transpose.int:
        dims = list(range(rank))
        a, b = named["dim0"] % rank, named["dim1"] % rank
        dims[a], dims[b] = b, a
    else:
        dims = [d % rank for d in named["dims"]]
    if dims[0] != 0:
        return None

    def on(part: fx.Node) -> fx.Node:
        return r.builder.call(aten.permute.default, part, dims)

    result = _each(joined, on, dims.index(joined.dim))
    return result, "sunk", "a permutation of dimensions, of each part of a concatenation"


@_for(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _flatten(r: Rewriter, node: fx.Node) -> Done | None:
    """Merging the concatenated dimension with all that follow joins the flattened parts."""
    joined = r.lazy(node.args[0])
    if not isinstance(joined, Joined):
        return None
    shape, out, dim = value(node.args[0]).shape, value(node).shape, joined.dim
    if len(out) != dim + 1 or not equal_shapes(tuple(shape[:dim]), tuple(out[:dim])):
        return None
    if not all(isinstance(s, int) for s in (*shape[1:], *out[1:])):
        return None

    def on(part: fx.Node) -> fx.Node:
        sizes = [r.builder.size(part), *(int(s) for s in shape[1:dim]), -1]
        return r.builder.call(aten.reshape.default, part, sizes)

    if any(s == 0 for s in shape[1:]):
        return None
    return _each(joined, on, dim), "sunk", "flattens each part of a concatenation"


# (b) A linear map over a concatenation splits.


@dataclasses.dataclass(frozen=True)
class _Half:
    """Parts of one batch: their rows, and the columns of the weight that belong to them."""

    x: fx.Node
    columns: tuple[tuple[int, int], ...]
    map: RowMap | None

    @property
    def width(self) -> int:
        return sum(stop - start for start, stop in self.columns)


def _halves(r: Rewriter, joined: Joined) -> tuple[_Half | None, list[_Half]]:
    """The candidates' half, and one for each map, the widest first."""
    own: list[tuple[fx.Node, tuple[int, int]]] = []
    read: dict[RowMap, list[tuple[fx.Node, tuple[int, int]]]] = {}
    start = 0
    for part, size in zip(joined.parts, joined.sizes, strict=True):
        columns = (start, start + size)
        start += size
        if isinstance(part, Gathered):
            read.setdefault(part.map, []).append((part.source, columns))
        else:
            own.append((part, columns))

    def half(parts: list[tuple[fx.Node, tuple[int, int]]], rows: RowMap | None) -> _Half:
        nodes = [n for n, _ in parts]
        x = nodes[0] if len(nodes) == 1 else r.builder.call(aten.cat.default, nodes, joined.dim)
        columns: list[tuple[int, int]] = []
        for _, (first, stop) in parts:
            if columns and columns[-1][1] == first:
                columns[-1] = (columns[-1][0], stop)
            else:
                columns.append((first, stop))
        return _Half(x, tuple(columns), rows)

    contexts = sorted((half(p, m) for m, p in read.items()), key=lambda h: -h.width)
    return (half(own, None) if own else None), contexts


def _columns(r: Rewriter, weight: fx.Node, half: _Half) -> fx.Node:
    """The half's columns of the weight: a view, where they lie together."""
    views = [r.builder.call(aten.slice.Tensor, weight, 1, a, b) for a, b in half.columns]
    return views[0] if len(views) == 1 else r.builder.call(aten.cat.default, views, 1)


def _map_arguments(r: Rewriter, rows: RowMap) -> tuple[fx.Node, fx.Node, fx.Node]:
    """cand_to_user, user_offsets and order of the ops, grouped once for the program."""
    grouped = r.builder.call(ikbo.group_candidates.default, rows.node, rows.rows)
    order, offsets = (r.builder.call(operator.getitem, grouped, i) for i in (0, 1))
    return rows.node, offsets, order


def _splits(r: Rewriter, weight: fx.Node, *others: fx.Node | None) -> bool:
    """Whether a weight may be split: shared by all rows, a matrix, in a type the ops take."""
    operands = [n for n in (weight, *others) if n is not None]
    dtypes = {value(n).dtype for n in operands}
    return (
        all(r.is_shared(n) for n in operands)
        and value(weight).dim() == 2
        and len(dtypes) == 1
        and dtypes <= set(FLOATS)
    )


@_for(aten.linear.default)
def _linear(r: Rewriter, node: fx.Node) -> Done | None:
    named = named_arguments(node)
    joined, weight, bias = r.lazy(named["input"]), named["weight"], named["bias"]
    if not isinstance(joined, Joined) or joined.dim != value(named["input"]).dim() - 1:
        return None
    if not _splits(r, weight, bias) or value(named["input"]).dtype != value(weight).dtype:
        return None
    new_bias = None if bias is None else r.plain(bias)
    return _split_linear(r, joined, r.plain(weight), new_bias)


@_for(aten.addmm.default, aten.mm.default)
def _addmm(r: Rewriter, node: fx.Node) -> Done | None:
    """The same as ATen's core ops write it: x @ w.t(), and addmm with a bias."""
    named = named_arguments(node)
    x, weight = named.get("mat1", named["self"]), named["mat2"]
    bias = named["self"] if node.target is aten.addmm.default else None
    joined = r.lazy(x)
    if not isinstance(joined, Joined) or joined.dim != 1 or not _splits(r, weight, bias):
        return None
    if value(x).dtype != value(weight).dtype or named.get("beta", 1) != 1:
        return None
    if named.get("alpha", 1) != 1 or (bias is not None and value(bias).dim() != 1):
        return None
    if bias is not None and not same(value(bias).shape[0], value(weight).shape[1]):
        return None
    transposed = r.builder.call(aten.permute.default, r.plain(weight), [1, 0])
    return _split_linear(r, joined, transposed, None if bias is None else r.plain(bias))


def _split_linear(r: Rewriter, joined: Joined, weight: fx.Node, bias: fx.Node | None) -> Done:
    b = r.builder
    rank = len(shape_of(joined.parts[0]))
    own, contexts = _halves(r, joined)
    result, fused = None, ""
    if own is not None:
        first, w_own = contexts[0], _columns(r, weight, own)
        assert first.map is not None
        w_first = _columns(r, weight, first)
        if rank == 2:
            maps = _map_arguments(r, first.map)
            result = b.call(ikbo.concat_linear.default, own.x, first.x, w_own, w_first, bias, *maps)
            fused, contexts = "concat_linear", contexts[1:]
        elif rank == 3 and _transposed(own.x) and _transposed(first.x):
            # Along the stacked axis, written as linear(stacked.mT).mT.
            maps = _map_arguments(r, first.map)
            e_own, e_first = (b.call(aten.permute.default, h.x, [0, 2, 1]) for h in (own, first))
            result = b.call(
                ikbo.linear_compression.default, e_own, e_first, w_own, w_first, bias, *maps
            )
            result = b.call(aten.permute.default, result, [0, 2, 1])
            fused, contexts = "linear_compression", contexts[1:]
        else:
            result = b.call(aten.linear.default, own.x, w_own, bias)
        bias = None
    for half in contexts:
        assert half.map is not None
        part = b.call(aten.linear.default, half.x, _columns(r, weight, half), bias)
        bias = None
        copied = b.node_of(Gathered(part, half.map, Place()))
        result = copied if result is None else b.call(aten.add.Tensor, result, copied)
    assert result is not None
    reason = "a linear map over a concatenation is the sum of linear maps of its parts"
    return result, f"replaced by {fused}" if fused else "split", reason


def _transposed(x: fx.Node) -> bool:
    """Whether x is the transpose of something, or a concatenation of such."""
    if x.target is aten.cat.default:
        parts = x.args[0]
        assert isinstance(parts, (list, tuple))
        return all(isinstance(p, fx.Node) and _transposed(p) for p in parts)
    return x.target is aten.permute.default and x.args[1] == [0, 2, 1]


# (c) A batched product over a concatenation splits.


@_for(aten.matmul.default)
def _matmul(r: Rewriter, node: fx.Node) -> Done | None:
    weight, x = node.args[:2]
    assert isinstance(weight, fx.Node) and isinstance(x, fx.Node)
    attended = _attended(r, node)
    if attended is not None:
        return attended
    if value(x).dim() == 2 and isinstance(r.lazy(weight), Joined):
        return _matmul_from_right(r, weight, x)
    return _compressed(r, weight, x)


@_for(aten.einsum.default)
def _einsum(r: Rewriter, node: fx.Node) -> Done | None:
    """einsum("mk,bkn->bmn", weight, stacked), by any letters and in either order."""
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
    return _compressed(r, weight, x)


def _compressed(r: Rewriter, weight: fx.Node, x: fx.Node) -> Done | None:
    joined = r.lazy(x)
    if not isinstance(joined, Joined) or value(x).dim() != 3 or joined.dim != 1:
        return None
    if not _splits(r, weight) or value(weight).dtype != value(x).dtype:
        return None
    b, new_weight = r.builder, r.plain(weight)
    own, contexts = _halves(r, joined)
    reason = "a product over stacked rows is the sum of the products of its parts"
    result, action = None, "split"
    if own is not None:
        first, *contexts = contexts
        assert first.map is not None
        w_own, w_first = (_columns(r, new_weight, h) for h in (own, first))
        maps = _map_arguments(r, first.map)
        result = b.call(
            ikbo.linear_compression.default, own.x, first.x, w_own, w_first, None, *maps
        )
        action = "replaced by linear_compression"
    for half in contexts:
        assert half.map is not None
        part = b.call(aten.matmul.default, _columns(r, new_weight, half), half.x)
        copied = b.node_of(Gathered(part, half.map, Place()))
        result = copied if result is None else b.call(aten.add.Tensor, result, copied)
    assert result is not None
    return result, action, reason


def _matmul_from_right(r: Rewriter, x: fx.Node, weight: fx.Node) -> Done | None:
    """x @ weight, where x is joined along its last dimension."""
    joined = r.lazy(x)
    assert isinstance(joined, Joined)
    if joined.dim != value(x).dim() - 1 or not _splits(r, weight):
        return None
    if value(x).dtype != value(weight).dtype:
        return None
    transposed = r.builder.call(aten.permute.default, r.plain(weight), [1, 0])
    return _split_linear(r, joined, transposed, None)


# (e) Softmax attention over copied keys and values.


@_for(aten.scaled_dot_product_attention.default)
def _attention(r: Rewriter, node: fx.Node) -> Done | None:
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
    maps = _map_arguments(r, k.map)
    out = b.call(ikbo.candidate_attention.default, *rows, None, None, *maps, scale)
    reason = "softmax attention over copied keys and values reads them through the map"
    return (
        b.call(aten.permute.default, out, [0, 2, 1, 3]),
        "replaced by candidate_attention",
        reason,
    )


def _attended(r: Rewriter, node: fx.Node) -> Done | None:
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
    done = _candidate_attention(r, query, r.lazy(query), r.lazy(key), r.lazy(v), scale)
    if done is not None:
        r.forget(*_between(weights, scores))
    return done


def _between(last: fx.Node, first: fx.Node) -> list[fx.Node]:
    """The chain of ops from first to last, as far back as nothing else needs it."""
    chain = [last]
    while chain[-1] is not first and len(chain[-1].users) == 1:
        before = chain[-1].args[0]
        assert isinstance(before, fx.Node)
        chain.append(before)
    return [n for n in chain if len(n.users) == 1]


# Activations join the op before them.

ACTIVATIONS = {
    aten.relu.default: "relu",
    aten.silu.default: "silu",
    aten.gelu.default: "gelu",
    aten.sigmoid.default: "sigmoid",
}
FUSING = (ikbo.concat_linear.default, ikbo.linear_compression.default)


def _fuse_activation(r: Rewriter, node: fx.Node) -> Done | None:
    before = node.args[0] if node.args else None
    if node.target not in ACTIVATIONS or not isinstance(before, fx.Node) or len(before.users) != 1:
        return None
    product = r.lazy(before)
    if not isinstance(product, fx.Node) or product.target not in FUSING or len(product.args) != 8:
        return None
    activation = ACTIVATIONS[node.target]
    if activation == "gelu" and named_arguments(node)["approximate"] == "tanh":
        activation = "gelu_tanh"
    fused = r.builder.call(product.target, *product.args, activation)  # type: ignore[arg-type]
    return fused, "replaced", "an activation fused with the product before it"
