"""The lineage of every value of an exported program: whose rows it holds, and why that is so.

The lattice is the sets of sources (the contexts and the candidates), joined by union. From the
bottom: shared (no source), of one context or candidate-side (one source), mixed (several). Beside
its sources a value has an axis: the batch whose row i, and no other row, its row i depends on. An
op without a rule keeps the sources and loses the axis.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Container, Mapping

import torch
from torch import fx

from .broadcasts import broadcast
from .rules import Place, RefusedError, is_tensor, place_of_result, same, value

CANDIDATES = "candidates"


class Kind(enum.Enum):
    """Where in the lattice a value stands."""

    SHARED = "shared"
    CONTEXT = "of one context"
    CANDIDATE = "candidate-side"
    MIXED = "mixed"


@dataclasses.dataclass(frozen=True)
class Lineage:
    """What a value depends on.

    Attributes:
        sources: names of the contexts, and ``"candidates"``, whose inputs it depends on.
        axis: whose rows it holds one by one, a context's name or ``"candidates"``; None if it holds
            nobody's: it is shared, or rows have mixed.
        place: where those rows stand.
        reason: why, in words.
    """

    sources: frozenset[str]
    axis: str | None
    place: Place | None
    reason: str

    @property
    def kind(self) -> Kind:
        if not self.sources:
            return Kind.SHARED
        if self.sources == {CANDIDATES}:
            return Kind.CANDIDATE
        of_context = self.axis not in (None, CANDIDATES)
        if of_context or (len(self.sources) == 1 and CANDIDATES not in self.sources):
            return Kind.CONTEXT
        return Kind.MIXED

    def __str__(self) -> str:
        whose = " and ".join(sorted(self.sources))
        rows = f", a row for each of {self.axis}" if self.axis else ""
        return f"{self.kind.value}{f' ({whose})' if whose else ''}{rows}: {self.reason}"


SHARED = Lineage(frozenset(), None, None, "a parameter, buffer or constant")


def trace_lineage(
    graph: fx.Graph,
    seeds: Mapping[str, str],
    across: Container[str] = (),
    jagged: Container[str] = (),
) -> dict[fx.Node, Lineage]:
    """The lineage of every node.

    Args:
        graph: of an exported program, functional ATen ops.
        seeds: of placeholders by name: the context's name or ``"candidates"``. The others are
            shared.
        across: those whose rows stand in dimension 1, not 0.
        jagged: those without a row for each: rows of different lengths one after another.
    """
    result: dict[fx.Node, Lineage] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            dim = None if node.name in jagged else 1 if node.name in across else 0
            result[node] = _seed(node, seeds.get(node.name), dim)
        elif node.op != "output":
            result[node] = _join(node, result)
    return result


def _seed(node: fx.Node, source: str | None, dim: int | None) -> Lineage:
    if source is None:
        return SHARED
    reason = f"an input of {source}"
    if dim is None or not is_tensor(node) or value(node).dim() == 0:
        return Lineage(frozenset({source}), None, None, f"{reason} without rows")
    return Lineage(frozenset({source}), source, Place(dim), reason)


def _join(node: fx.Node, known: Mapping[fx.Node, Lineage]) -> Lineage:
    inputs = [known[n] for n in node.all_input_nodes]
    sources = frozenset().union(*(i.sources for i in inputs))
    found = broadcast(node)
    if found is not None:
        index = known.get(found.by) if isinstance(found.by, fx.Node) else None
        source = known[found.source]
        if index is not None and index.axis != source.axis and index.place == Place():
            # The map only says which row: what the value is made of is the source's.
            return Lineage(source.sources, index.axis, Place(), f"rows copied by {found.reason}")
    if not sources:
        return SHARED
    if _is_size(node):
        return Lineage(frozenset(), None, None, "a size")
    axes = {i.axis for i in inputs if i.sources}
    if None in axes:
        return Lineage(sources, None, None, "rows have mixed in an argument")
    if len(axes) > 1:
        return Lineage(sources, None, None, "its arguments hold rows of different batches")
    places = {n: p for n in node.all_input_nodes if (p := known[n].place) is not None}
    try:
        place, reason = place_of_result(node, places)
    except RefusedError as refused:
        return Lineage(sources, None, None, str(refused))
    return Lineage(sources, axes.pop(), place, reason)


def _is_size(node: fx.Node) -> bool:
    return isinstance(value(node), (int, torch.SymInt))


def rows_of(node: fx.Node, lineages: Mapping[fx.Node, Lineage], sizes: Mapping[str, object]) -> str:
    """The context whose rows a value holds along dimension 0, or "" if that isn't proved.

    Rows that have mixed among themselves are still a context's, as long as there are as many.
    """
    lineage = lineages[node]
    if lineage.axis is not None:
        leads = lineage.axis != CANDIDATES and lineage.place == Place()
        return lineage.axis if leads else ""
    if CANDIDATES in lineage.sources or not is_tensor(node) or value(node).dim() == 0:
        return ""
    found = [c for c in sorted(lineage.sources)
             if c in sizes and same(value(node).shape[0], sizes[c])]  # fmt: skip
    return found[0] if len(found) == 1 else ""
