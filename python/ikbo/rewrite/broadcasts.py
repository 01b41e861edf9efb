"""The forms in which a model copies rows of a context, once for each row of another batch.

Recognised: ``index_select``, ``x[idx]``, ``embedding`` with the context's rows as its table,
``gather`` along dimension 0 with an expanded index,
``repeat_interleave`` by a number or by counts, one row under ``expand``, ``expand`` with a view
that merges the new dimension into the first, and FBGEMM's index-selects (`algebra.sparse` has the
rest).
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from typing import Any

import torch
from torch import fx

from .rules import INTEGERS, argument, aten, is_tensor, named_arguments, same, value


class Form(enum.Enum):
    """How the map of a broadcast is given."""

    INDEX = "index"  # a tensor of row numbers
    COUNTS = "counts"  # a tensor: how often each row is repeated
    REPEAT = "repeat"  # a number: how often every row is repeated
    ONE_ROW = "one row"  # there is one row, repeated for all


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """``node == source.index_select(0, map)``, the map given by ``form`` and ``by``.

    Attributes:
        source: what is copied; its dimension 0 are the rows.
        form: what ``by`` is.
        by: the index, the counts or the number of repetitions.
        wraps: whether negative indices count from the end, as in ``x[idx]``.
        reason: the form in words.
    """

    source: fx.Node
    form: Form
    by: Any
    wraps: bool
    reason: str


def broadcast(node: fx.Node) -> Broadcast | None:
    """The broadcast that a node is, or None."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return _one_of_several(node)
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target in VIEWS:
        return _expanded_and_merged(node)
    recognise = FORMS.get(node.target) or FBGEMM.get(str(node.target))
    return None if recognise is None else recognise(node, named_arguments(node))


def row_index(node: fx.Node) -> fx.Node:
    """The index below copies that change nothing of it, so that equal maps are one node."""
    while True:
        named = named_arguments(node) if isinstance(node.target, torch._ops.OpOverload) else {}
        whole = node.target is aten.slice.Tensor and named["start"] in (0, None) and same(
            value(node).shape[0], value(named["self"]).shape[0]
        ) and named["dim"] == 0  # fmt: skip
        widened = node.target in (aten._to_copy.default, aten.to.dtype) and (
            value(node).dtype is torch.int64 and value(named["self"]).dtype in INTEGERS
        )
        if not (whole or widened or node.target in (aten.clone.default, aten.alias.default)):
            return node
        node = named["self"]


def _is_row_index(node: Any) -> bool:
    return is_tensor(node) and value(node).dtype in INTEGERS and value(node).dim() == 1


def _index_select(node: fx.Node, named: dict[str, Any]) -> Broadcast | None:
    if named["dim"] != 0 or not _is_row_index(named["index"]):
        return None
    return Broadcast(named["self"], Form.INDEX, row_index(named["index"]), False, "index_select")


def _index(node: fx.Node, named: dict[str, Any]) -> Broadcast | None:
    if len(named["indices"]) != 1 or not _is_row_index(named["indices"][0]):
        return None
    index = row_index(named["indices"][0])
    return Broadcast(named["self"], Form.INDEX, index, True, "x[idx]")


def _embedding(node: fx.Node, named: dict[str, Any]) -> Broadcast | None:
    if not _is_row_index(named["indices"]) or named["scale_grad_by_freq"] or named["sparse"]:
        return None
    if named["padding_idx"] >= 0:
        return None  # its row has no gradient
    index = row_index(named["indices"])
    return Broadcast(named["weight"], Form.INDEX, index, False, "embedding of context rows")


def _gather(node: fx.Node, named: dict[str, Any]) -> Broadcast | None:
    index = named["index"]
    if named["dim"] != 0 or value(index).dim() < 2:
        return None
    # All columns of the index must be one: an expand of [B, 1, ..., 1] over the source's sizes.
    sizes = zip(value(index).shape[1:], value(named["self"]).shape[1:], strict=True)
    if index.target is not aten.expand.default or not all(same(a, b) for a, b in sizes):
        return None
    column = argument(index, 0)
    if not same(value(column).shape[0], value(index).shape[0]):
        return None
    while column.target is aten.unsqueeze.default or column.target in VIEWS:
        # [B, 1, ..., 1] all the way: the same numbers in the same order.
        shape = value(column).shape
        if not all(same(s, 1) for s in shape[1:]):
            return None
        column = argument(column, 0)
        if value(column).dim() == 1:
            if not same(value(column).shape[0], shape[0]) or not _is_row_index(column):
                return None
            reason = "gather with an expanded index"
            return Broadcast(named["self"], Form.INDEX, row_index(column), False, reason)
    return None


def _repeat_by_counts(node: fx.Node, named: dict[str, Any]) -> Broadcast | None:
    counts = named["repeats"]
    if named["dim"] != 0 or not _is_row_index(counts):
        return None
    if not same(value(counts).shape[0], value(named["self"]).shape[0]):
        return None
    reason = "repeat_interleave by counts"
    return Broadcast(named["self"], Form.COUNTS, counts, False, reason)


def _repeat_by_number(node: fx.Node, named: dict[str, Any]) -> Broadcast | None:
    if named["dim"] != 0 or not isinstance(named["repeats"], int):
        return None
    return Broadcast(named["self"], Form.REPEAT, named["repeats"], False, "repeat_interleave")


def _one_row(node: fx.Node, named: dict[str, Any]) -> Broadcast | None:
    source, out = value(named["self"]), value(node)
    if source.dim() != out.dim() or not source.dim() or not same(source.shape[0], 1):
        return None
    if same(out.shape[0], 1) or not all(
        same(a, b) for a, b in zip(source.shape[1:], out.shape[1:], strict=True)
    ):
        return None
    return Broadcast(named["self"], Form.ONE_ROW, None, False, "expand of one row")


def _expanded_and_merged(node: fx.Node) -> Broadcast | None:
    """[U, ...] -> [U, 1, ...] -> [U, R, ...] -> [U * R, ...]."""
    expanded = argument(node, 0)
    if expanded.target is aten.clone.default:
        expanded = argument(expanded, 0)
    if expanded.target is not aten.expand.default:
        return None
    single = argument(expanded, 0)
    if single.target is not aten.unsqueeze.default or named_arguments(single)["dim"] != 1:
        return None
    source = argument(single, 0)
    shape, wide, out = value(source).shape, value(expanded).shape, value(node).shape
    if len(wide) != len(shape) + 1 or len(out) != len(shape) or not isinstance(wide[1], int):
        return None
    kept = [(wide[0], shape[0]), (out[0], wide[0] * wide[1])]
    kept += [*zip(wide[2:], shape[1:], strict=True), *zip(out[1:], shape[1:], strict=True)]
    if not all(same(a, b) for a, b in kept):
        return None
    return Broadcast(source, Form.REPEAT, wide[1], False, "expand and reshape")


def _one_of_several(node: fx.Node) -> Broadcast | None:
    """A result of FBGEMM's ops, known by their names: they needn't be installed."""
    call, i = node.args
    assert isinstance(call, fx.Node) and isinstance(i, int)
    name = str(call.target)
    if name == "fbgemm.jagged_index_select.default" and i == 1:
        lengths, index = argument(call, 1), argument(call, 2)
        return Broadcast(lengths, Form.INDEX, row_index(index), False, "jagged_index_select")
    if name == "fbgemm.group_index_select_dim0.default":
        inputs, indices = call.args[:2]
    elif name == "fbgemm.group_index_select_dim0_gpu_impl.default":
        both, n = call.args[:2]
        assert isinstance(both, (list, tuple)) and isinstance(n, int)
        indices, inputs = both[:n], both[n:]
    else:
        return None
    assert isinstance(inputs, (list, tuple)) and isinstance(indices, (list, tuple))
    source, by = inputs[i], indices[i]
    if not isinstance(source, fx.Node) or not isinstance(by, fx.Node):
        return None
    reason = "group_index_select_dim0, as TorchRec's inverse_indices"
    return Broadcast(source, Form.INDEX, row_index(by), False, reason)


def _index_select_dim0(node: fx.Node, named: dict[str, Any]) -> Broadcast | None:
    if not _is_row_index(named["indices"]):
        return None
    index = row_index(named["indices"])
    return Broadcast(named["input"], Form.INDEX, index, False, "index_select_dim0")


FBGEMM = {"fbgemm.index_select_dim0.default": _index_select_dim0}
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
FORMS = {
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.gather.default: _gather,
    aten.embedding.default: _embedding,
    aten.repeat_interleave.self_Tensor: _repeat_by_counts,
    aten.repeat_interleave.self_int: _repeat_by_number,
    aten.expand.default: _one_row,
}
