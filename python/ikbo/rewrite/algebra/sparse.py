"""Copies of jagged rows: FBGEMM's ops, known by their names, so that they needn't be installed.

``jagged_index_select`` and ``reorder_batched_ad_*`` with broadcast copy rows of different lengths.
A copy of such rows stays a `Jagged` value through embeddings and element-wise ops, up to the op
that makes one row of each: a sum of embeddings or a padded row, which is read through the map.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..broadcasts import Broadcast, Form, row_index
from ..engine import Done, Rewriter
from ..rules import (
    Place,
    RefusedError,
    aten,
    is_tensor,
    named_arguments,
    place_of_result,
    same,
    value,
)
from ..values import Gathered, Jagged, Offsets, RowMap
from .registry import algebra_for

CUMSUM = "fbgemm.asynchronous_complete_cumsum.default"
COPIED = "rows of different lengths, copied"
BAGS = (aten.embedding_bag.padding_idx, aten.embedding_bag.default,
        aten._embedding_bag.default, aten._embedding_bag_forward_only.default)  # fmt: skip


@algebra_for(operator.getitem)
def jagged_rows(r: Rewriter, node: fx.Node) -> Done | None:
    """The values of ``jagged_index_select(values, lengths, indices)``."""
    call, i = node.args
    assert isinstance(call, fx.Node)
    if str(call.target) != "fbgemm.jagged_index_select.default" or i != 0:
        return None
    values, lengths, index = call.args[:3]
    assert isinstance(lengths, fx.Node) and isinstance(index, fx.Node)
    found = Broadcast(lengths, Form.INDEX, row_index(index), False, "jagged_index_select")
    read = r.gathered(call, found)
    source = r.lazy(values)
    if read is None or not isinstance(source, fx.Node) or not read.place.leading:
        return None
    # The op itself, for what has no rule; it goes when nothing needs it.
    return Jagged(source, read, r.copied(node)), "deferred", COPIED


@algebra_for("fbgemm.reorder_batched_ad_lengths.default")
def reordered_lengths(r: Rewriter, node: fx.Node) -> Done | None:
    """Lengths by request and table, ``[U * T]``, become lengths by table and ad, ``[T * B]``."""
    named = named_arguments(node)
    lengths, offsets = named["cat_ad_lengths"], named["batch_offsets"]
    rows = _requests(r, offsets)
    if not named["broadcast_lengths"] or named["max_batch_size"] != 0 or rows is None:
        return None
    tables = _times(value(lengths).shape[0], rows)
    if tables is None or r.lineages[lengths].sources != r.lineages[offsets].sources:
        return None
    b = r.builder
    by_request = b.call(aten.reshape.default, r.plain(lengths), [-1, tables])
    by_table = b.call(aten.permute.default, by_request, [1, 0])
    source = b.call(aten.reshape.default, by_table, [-1])
    ads = named["num_ads_in_batch"]
    count = r.plain(ads) if isinstance(ads, fx.Node) else ads
    each = b.call(aten.diff.default, r.plain(offsets))
    index = b.call(aten.repeat_interleave.Tensor, each, output_size=count)
    read = Gathered(source, RowMap(index, b.size(by_request)), Place(0, outer=tables))
    r.reordered[read] = (lengths, offsets)
    return read, "broadcast", "reorder_batched_ad_lengths with broadcast"


def _requests(r: Rewriter, offsets: fx.Node) -> Any:
    """The size of the context that these are the offsets of."""
    sources = r.lineages[offsets].sources
    size: Any = r.sizes.get(next(iter(sources))) if len(sources) == 1 else None
    return size if size is not None and same(value(offsets).shape[0], size + 1) else None


def _times(whole: Any, part: Any) -> int | None:
    """The number n for which whole is n * part."""
    if isinstance(whole, int):
        return None
    n = whole.node.expr / (part if isinstance(part, int) else part.node.expr)
    return int(n) if n.is_Integer else None


@algebra_for("fbgemm.reorder_batched_ad_indices.default")
def reordered_values(r: Rewriter, node: fx.Node) -> Done | None:
    """The values of such rows: first in the order of the tables, then copied to the ads."""
    named = named_arguments(node)
    offsets = r.lazy(named["reordered_cat_ad_offsets"])
    if not named["broadcast_indices"] or not isinstance(offsets, Offsets) or not offsets.whole:
        return None
    lengths, batch = r.reordered.get(offsets.lengths, (None, None))
    before = named["cat_ad_offsets"]
    if batch is not named["batch_offsets"] or str(before.target) != CUMSUM:
        return None
    if before.args[0] is not lengths:
        return None
    b, rows = r.builder, offsets.lengths.map.rows
    dtype, device = value(batch).dtype, value(batch).device
    end = b.call(operator.add, rows, 1) if isinstance(rows, fx.Node) else rows + 1
    each = b.call(aten.arange.default, end, dtype=dtype, device=device)
    values = b.call(
        r.named_op(str(node.target)), r.plain(before), r.plain(named["cat_ad_indices"]),
        _offsets_of_source(r, offsets), each, rows, False, -1,
    )  # fmt: skip
    return Jagged(values, offsets.lengths, r.copied(node)), "deferred", COPIED


@algebra_for(CUMSUM)
def offsets(r: Rewriter, node: fx.Node) -> Done | None:
    """Where the copied rows begin."""
    lengths = r.lazy(node.args[0])
    if not isinstance(lengths, Gathered):
        return None
    return Offsets(lengths, True, r.copied(node)), "deferred", "offsets of rows copied"


@algebra_for(aten.slice.Tensor)
def without_last(r: Rewriter, node: fx.Node) -> Done | None:
    """``offsets[:-1]``."""
    lazy, named = r.lazy(node.args[0]), named_arguments(node)
    if not isinstance(lazy, Offsets) or not lazy.whole:
        return None
    if (named["start"] or 0, named["end"], named["step"]) != (0, -1, 1):
        return None
    return Offsets(lazy.lengths, False, r.copied(node)), "deferred", "offsets of rows copied"


def _offsets_of_source(r: Rewriter, of: Offsets) -> fx.Node:
    whole = r.builder.call(r.named_op(CUMSUM), of.lengths.source)
    return whole if of.whole else r.builder.call(aten.slice.Tensor, whole, 0, 0, -1)


@algebra_for("fbgemm.jagged_to_padded_dense.default")
def padded(r: Rewriter, node: fx.Node) -> Done | None:
    """A padded row for each jagged one."""
    values, offsets, *rest = node.args
    assert isinstance(offsets, (list, tuple))
    jagged, of = r.lazy(values), r.lazy(offsets[0])
    if not isinstance(jagged, Jagged) or not isinstance(of, Offsets) or not of.whole:
        return None
    if len(offsets) != 1 or of.lengths != jagged.lengths:
        return None
    if any(isinstance(n, fx.Node) for n in node.all_input_nodes[2:]):
        return None
    op, begins = r.named_op(str(node.target)), [_offsets_of_source(r, of)]
    dense = r.builder.call(op, jagged.values, begins, *rest, **node.kwargs)
    read = Gathered(dense, of.lengths.map, of.lengths.place)
    return read, "sunk", "makes a row of each jagged row"


@algebra_for(operator.getitem)
def bag(r: Rewriter, node: fx.Node) -> Done | None:
    """The sum, mean or maximum of the embeddings of each jagged row."""
    call, i = node.args
    assert isinstance(call, fx.Node)
    if call.target not in BAGS or i != 0:
        return None
    named = named_arguments(call)
    jagged, of = r.lazy(named["indices"]), r.lazy(named["offsets"])
    if not isinstance(jagged, Jagged) or not isinstance(of, Offsets):
        return None
    if jagged.lengths != of.lengths or of.whole != bool(named["include_last_offset"]):
        return None
    weights = named["per_sample_weights"]
    weighted = None if weights is None else r.lazy(weights)
    if weights is not None and (
        not isinstance(weighted, Jagged) or weighted.lengths != jagged.lengths
    ):
        return None
    if not r.is_shared(named["weight"]):
        return None
    new = {named["indices"]: jagged.values, named["offsets"]: _offsets_of_source(r, of),
           named["weight"]: r.plain(named["weight"])}  # fmt: skip
    if isinstance(weighted, Jagged):
        new[weights] = weighted.values
    args, kwargs = fx.node.map_arg((call.args, dict(call.kwargs)), new.__getitem__)
    once = r.builder.call(operator.getitem, r.builder.call(call.target, *args, **kwargs), 0)
    read = Gathered(once, of.lengths.map, of.lengths.place)
    return read, "sunk", "makes a row of each jagged row"


def on_jagged(r: Rewriter, node: fx.Node) -> Done | None:
    """An op on the elements of jagged rows, one by one."""
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    jagged = {n: lazy for n in tensors if isinstance(lazy := r.values[n], Jagged)}
    others = [n for n in tensors if n not in jagged]
    if not jagged or not isinstance(value(node), torch.Tensor):
        return None
    lengths = {j.lengths for j in jagged.values()}
    if len(lengths) != 1 or len(tensors) != len(node.all_input_nodes):
        return None
    if not all(r.is_shared(n) for n in others):
        return None
    try:
        place, reason = place_of_result(node, {n: Place() for n in jagged})
    except RefusedError:
        return None
    if not place.leading:
        return None

    def source(n: fx.Node) -> fx.Node:
        return jagged[n].values if n in jagged else r.plain(n)

    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), source)
    call = r.builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    return Jagged(call, lengths.pop(), r.copied(node)), "sunk", f"{reason}, on jagged rows"
