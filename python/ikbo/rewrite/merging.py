"""Compressions of the same embeddings become one, which reads them once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .cost import constant_nodes
from .engine import Rewriter
from .rules import aten, named_arguments, value
from .values import Builder

REASON = "compressions of the same embeddings: one, with their weights below each other"
Op = torch.ops.ikbo.linear_compression.default
OF_ROWS = ("e_cand", "e_user", "cand_to_user")


def merge_compressions(rewriter: Rewriter, inputs: set[str]) -> None:
    """Makes one ``linear_compression`` of those of the same rows, where weights are parameters.

    Args:
        rewriter: after its run.
        inputs: names of the placeholders that aren't parameters.
    """
    graph = rewriter.builder.graph
    constants = constant_nodes(graph, inputs)
    groups: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=Op):
        named = named_arguments(node)
        weights = {named[n] for n in ("w_cand", "w_user", "bias") if named[n] is not None}
        if named["activation"] == "none" and weights <= constants:
            groups.setdefault(tuple(named[n] for n in OF_ROWS), []).append(node)
    for group in groups.values():
        if len(group) > 1:
            for node in group:
                rewriter.note("merged", node, REASON)
            with graph.inserting_before(graph.output_node()):
                _merge(rewriter.builder, group)
    _sort(graph)
    graph.eliminate_dead_code()


def _merge(builder: Builder, group: Sequence[fx.Node]) -> None:
    call, named = builder.call, [named_arguments(n) for n in group]
    heights = [value(n["w_cand"]).shape[0] for n in named]
    weights = [call(aten.cat.default, [n[w] for n in named]) for w in ("w_cand", "w_user")]
    bias = None
    if any(n["bias"] is not None for n in named):
        like: Any = {"dtype": value(weights[0]).dtype, "device": value(weights[0]).device}
        biases = [call(aten.full.default, [h], 0, **like) if n["bias"] is None else n["bias"]
                  for n, h in zip(named, heights, strict=True)]  # fmt: skip
        bias = call(aten.cat.default, biases)
    e_cand, e_user, index = (named[0][n] for n in OF_ROWS)
    product = call(Op, e_cand, e_user, *weights, bias, index, None, None)
    begin = 0
    for node, height in zip(group, heights, strict=True):
        its = call(aten.slice.Tensor, product, 1, begin, begin + height)
        node.replace_all_uses_with(its)
        begin += height


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
