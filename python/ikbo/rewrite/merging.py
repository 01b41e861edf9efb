"""Products of the same stacked rows with parameters become one, which reads the rows once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .algebra import registry
from .cost import constant_nodes
from .engine import Rewriter
from .rules import aten, named_arguments, value
from .values import Builder

JOINS = "products of the same rows of both sides: one, with their weights below each other"
PRODUCTS = "products of the same rows: one, with their weights beside each other"
COPIED = "its rows are copied for another product: one product of those, not one of each part"
Op = torch.ops.ikbo.linear_compression.default
Joining = (Op, torch.ops.ikbo.concat_linear.default)
# Weights are put together in each call, which pays for narrow ones.
MOST_ROWS = 256


@dataclasses.dataclass(frozen=True)
class _Product:
    """``weight.T @ rows + bias`` of rows [B, K, D], weight [K, M], bias [M]; or its transpose."""

    node: fx.Node
    rows: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


def merge_products(rewriter: Rewriter, inputs: set[str]) -> None:
    """Makes one product of those of the same rows ``[B, K, D]``, where weights are parameters.

    Args:
        rewriter: after its run.
        inputs: names of the placeholders that aren't parameters.
    """
    graph, builder = rewriter.builder.graph, rewriter.builder
    constants = constant_nodes(graph, inputs)
    with graph.inserting_before(graph.output_node()):
        products: dict[fx.Node, list[_Product]] = {}
        joins: dict[tuple[object, ...], list[fx.Node]] = {}
        for node in list(graph.nodes):
            product = _of_copies(builder, node) or _product(builder, node, constants)
            if product is not None:
                products.setdefault(product.rows, []).append(product)
            elif node.target in Joining and _is_plain(node, constants):
                x_cand, x_user, *_ = node.args
                joins.setdefault((node.target, x_cand, x_user, node.args[5]), []).append(node)
        for group in joins.values():
            if len(group) > 1 and sum(value(n).shape[1] for n in group) <= MOST_ROWS:
                _merge_joins(builder, group)
                for node in group:
                    rewriter.note("merged", node, JOINS)
        for its in products.values():
            if len(its) > 1 or its[0].node.target is Op:
                _merge(builder, its)
                for p in its:
                    rewriter.note("merged", p.node, COPIED if p.node.target is Op else PRODUCTS)
    _sort(graph)
    graph.eliminate_dead_code()


def _product(builder: Builder, node: fx.Node, constants: set[fx.Node]) -> _Product | None:
    """``linear(rows.mT, weight.T, bias)`` or ``rows.mT @ weight``."""
    if node.target is aten.linear.default:
        x, weight, bias = (*node.args, None)[:3]
    elif node.target is aten.matmul.default:
        (x, weight), bias = node.args, None
    else:
        return None
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    rows, transposed = _untransposed(x)
    operands = {n for n in (weight, bias) if isinstance(n, fx.Node)}
    if not transposed or value(weight).dim() != 2 or not operands <= constants:
        return None
    if node.target is aten.linear.default:
        weight = builder.call(aten.permute.default, weight, [1, 0])
    assert bias is None or isinstance(bias, fx.Node)
    return _Product(node, rows, weight, bias, True)


def _of_copies(builder: Builder, node: fx.Node) -> _Product | None:
    """A compression of rows that the program copies anyway, as a product of the copies.

    Few rows of a stack, times a matrix, are a product's smallest piece: two of them, one for each
    part, and their sum take longer than one.
    """
    if node.target is not Op or not registry.counts_launches(value(node).device):
        return None
    named = named_arguments(node)
    if named["activation"] != "none":
        return None
    (own, _), (source, _) = (_untransposed(named[n]) for n in ("e_cand", "e_user"))
    for cat in own.users:
        if cat.target is not aten.cat.default or cat.args[1:] != (1,):
            continue
        parts: Any = cat.args[0]
        copied = [c for n in parts if n is not own and (c := builder.copy_of(n))]
        if len(parts) != 2 or len(copied) != 1:
            continue
        if copied[0].source is source and _is_map(named["cand_to_user"], copied[0].map.node):
            both = [named["w_cand" if n is own else "w_user"] for n in parts]
            weight = builder.call(aten.cat.default, both, 1)
            weight = builder.call(aten.permute.default, weight, [1, 0])
            return _Product(node, cat, weight, named["bias"], False)
    return None


def _is_map(index: fx.Node, map_node: fx.Node) -> bool:
    return index is map_node or (
        index.target is aten._to_copy.default and index.args == (map_node,)
    )


def _is_plain(node: fx.Node, constants: set[fx.Node]) -> bool:
    """Whether a product of both sides has no activation, and parameters for weights."""
    named = named_arguments(node)
    weights = {named[n] for n in ("w_cand", "w_user", "bias") if named[n] is not None}
    return named["activation"] == "none" and weights <= constants


def _untransposed(x: fx.Node) -> tuple[fx.Node, bool]:
    """What x is or, of its last two of three dimensions, the transpose of, and which of the two."""
    transposed = False
    while (x.target is aten.permute.default and x.args[1] == [0, 2, 1]) or (
        x.target is aten.transpose.int
        and value(x).dim() == 3
        and {d % 3 for d in x.args[1:] if isinstance(d, int)} == {1, 2}
    ):
        x, transposed = x.all_input_nodes[0], not transposed
    return x, transposed


def _merge(builder: Builder, products: Sequence[_Product]) -> None:
    """``weights.T @ rows``, the weights beside each other."""
    call, rows = builder.call, products[0].rows
    weights = [p.weight for p in products]
    weight = builder.cat(weights, 1)
    rows, weight = _in_whole_bytes(builder, rows, weight)
    turned = call(aten.permute.default, weight, [1, 0])
    sizes = [builder.size(rows), *value(turned).shape]
    product = call(aten.bmm.default, call(aten.expand.default, turned, sizes), rows)
    begin = 0
    for p in products:
        end = begin + value(p.weight).shape[1]
        its = call(aten.slice.Tensor, product, 1, begin, end)
        if p.bias is not None:
            its = call(aten.add.Tensor, its, call(aten.unsqueeze.default, p.bias, 1))
        if p.transposed:
            its = call(aten.permute.default, its, [0, 2, 1])
        p.node.replace_all_uses_with(its)
        begin = end


def _in_whole_bytes(builder: Builder, rows: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Both with zeros behind what is summed over, so that rows of the weight begin at multiples of
    16 bytes: products of others are an order slower. Only where the rows are stacked anyway.
    """
    call, summed, its = builder.call, value(weight).shape[0], value(rows)
    gap = -summed % (16 // its.element_size())
    if not gap or rows.target is not aten.cat.default or not isinstance(rows.args[0], list):
        return rows, weight
    like: Any = {"dtype": its.dtype, "device": its.device}
    zeros = call(aten.full.default, [builder.size(rows.args[0][0]), gap, its.shape[2]], 0, **like)
    stacked = call(aten.cat.default, [*rows.args[0], zeros], 1)
    rows.replace_all_uses_with(call(aten.slice.Tensor, stacked, 1, 0, summed))
    below = call(aten.full.default, [gap, value(weight).shape[1]], 0, **like)
    return stacked, call(aten.cat.default, [weight, below], 0)


def _merge_joins(builder: Builder, group: Sequence[fx.Node]) -> None:
    """``concat_linear`` or ``linear_compression``: a row of the weights is one of the result's
    dimension 1."""
    call, named = builder.call, [named_arguments(n) for n in group]
    heights = [value(n["w_cand"]).shape[0] for n in named]
    weights = [call(aten.cat.default, [part for n in named for part in _stacked(builder, n[w])])
               for w in ("w_cand", "w_user")]  # fmt: skip
    bias = None
    if any(n["bias"] is not None for n in named):
        like: Any = {"dtype": value(weights[0]).dtype, "device": value(weights[0]).device}
        biases = [call(aten.full.default, [h], 0, **like) if n["bias"] is None else n["bias"]
                  for n, h in zip(named, heights, strict=True)]  # fmt: skip
        bias = call(aten.cat.default, biases)
    x_cand, x_user, *_ = group[0].args
    index = named[0]["cand_to_user"]
    assert callable(group[0].target)
    product = call(group[0].target, x_cand, x_user, *weights, bias, index, None, None)
    begin = 0
    for node, height in zip(group, heights, strict=True):
        its = call(aten.slice.Tensor, product, 1, begin, begin + height)
        node.replace_all_uses_with(its)
        begin += height


def _stacked(builder: Builder, weight: fx.Node) -> list[fx.Node]:
    """What a weight's rows are a concatenation of."""
    if weight.target is not aten.cat.default or (*weight.args[1:], 0)[0] != 0:
        return [builder.together(weight)]
    parts: Any = weight.args[0]
    return [n for part in parts for n in _stacked(builder, part)]


def _sort(graph: fx.Graph) -> None:
    """Puts every node behind what it reads, else in the order that they have."""
    output, placed = graph.output_node(), set[fx.Node]()

    def place(node: fx.Node) -> None:
        if node in placed:
            return
        placed.add(node)
        for n in node.all_input_nodes:
            place(n)
        output.prepend(node)

    for node in list(graph.nodes):
        if node is not output:
            place(node)
