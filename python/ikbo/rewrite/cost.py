"""What a program costs, as functions of the sizes of its batches.

The model of a compiled program: products and other dense ops read their operands and write their
results; everything else is fused into its neighbours, and costs what it reads of, and writes to,
memory. Rows of a context that are read through a map are read once, since the caches hold them.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from .rules import RULES, aten, named_arguments, value

ikbo = torch.ops.ikbo
Expr = Any  # a sympy expression or a number


@dataclasses.dataclass(frozen=True)
class OpCost:
    """Of one op, or, as "fused", of all that isn't dense: FLOP, bytes of traffic, kernels."""

    op: str
    flop: Expr
    bytes: Expr
    launches: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOP and bytes of a program in the sizes of its batches, named as in ``rewrite``.

    Attributes:
        ops: the dense ops one by one, then the rest together.
    """

    ops: tuple[OpCost, ...]

    @property
    def flop(self) -> Expr:
        """The number of operations, multiplications and additions one each: an expression."""
        return sympy.expand(sum(o.flop for o in self.ops))

    @property
    def bytes(self) -> Expr:
        """Bytes read and written: an expression."""
        return sympy.expand(sum(o.bytes for o in self.ops))

    @property
    def launches(self) -> int:
        """How many kernels a compiled program launches, about: those of dense ops, and one for
        each result of fused ops that is stored."""
        return sum(o.launches for o in self.ops)

    def at(self, **sizes: int) -> tuple[float, float]:
        """FLOP and bytes at given sizes: ``cost.at(user=15, candidates=1024)``."""
        return _number(self.flop, sizes), _number(self.bytes, sizes)

    def seconds(
        self, *, copy_TBps: float, matmul_TFLOPS: float, launch_us: float = 0.0, **sizes: int
    ) -> float:
        """The time at the ceilings: of each op the longer of its two, and one for each kernel."""
        return launch_us * 1e-6 * self.launches + sum(
            max(
                _number(o.flop, sizes) / (matmul_TFLOPS * 1e12),
                _number(o.bytes, sizes) / (copy_TBps * 1e12),
            )
            for o in self.ops
        )


def _number(expression: Expr, sizes: Mapping[str, int]) -> float:
    result = sympy.sympify(expression).subs({sympy.Symbol(n): s for n, s in sizes.items()})
    if result.free_symbols:
        names = ", ".join(sorted(str(s) for s in result.free_symbols))
        raise ValueError(f"ikbo.rewrite: expected a size for each of {names}, got {dict(sizes)}.")
    return float(result)


def program_cost(program: ExportedProgram, names: Mapping[Any, str]) -> Cost:
    """The cost of a program. What depends on parameters only counts as folded.

    Args:
        names: what the symbols of the program's sizes are called.
    """
    symbols = {s: sympy.Symbol(n) for s, n in names.items()}
    return _Costs(program, symbols).cost()


def constant_nodes(graph: fx.Graph, inputs: set[str]) -> set[fx.Node]:
    """What depends on no placeholder named in ``inputs``: parameters and what is made of them."""
    result: set[fx.Node] = set()
    for node in graph.nodes:
        made = node.op == "call_function" and all(n in result for n in node.all_input_nodes)
        if made or (node.op == "placeholder" and node.name not in inputs):
            result.add(node)
    return result


class _Costs:
    def __init__(self, program: ExportedProgram, symbols: Mapping[Any, Any]) -> None:
        self._graph, self._symbols = program.graph, symbols
        self._constants = constant_nodes(
            program.graph, {str(n) for n in program.graph_signature.user_inputs}
        )
        self._dense = [n for n in self._graph.nodes
                       if n.target in FLOP and n not in self._constants]  # fmt: skip

    def cost(self) -> Cost:
        ops = [OpCost(str(n.target), FLOP[n.target](self, n), self._traffic(n),
                      LAUNCHES.get(n.target, 1)) for n in self._dense]  # fmt: skip
        return Cost((*ops, self._fused()))

    def _traffic(self, node: fx.Node) -> Expr:
        read = {_stored(n): n for n in node.all_input_nodes}
        return sum((self.bytes(n) for n in read.values()), self.bytes(node))

    def _fused(self) -> OpCost:
        """Stored tensors that fused ops read, once each, and results of theirs that are stored."""
        dense = set(self._dense)
        flop: Expr = 0
        read: dict[fx.Node, Expr] = {}
        written: dict[fx.Node, Expr] = {}
        for node in self._graph.nodes:
            if node.op != "call_function" or node in dense or node.target in VIEWS:
                continue
            if node in self._constants:
                continue
            flop += self.numel(node)
            for n in node.all_input_nodes:
                source = _stored(n)
                if source.op == "placeholder" or source in dense or source in self._constants:
                    looked_up = node.target is aten.embedding.default and n is node.args[0]
                    read[source] = self.bytes(node if looked_up else n)
            if any(u in dense or u.op == "output" for u in users(node)):
                written[node] = self.bytes(node)
        return OpCost("fused", flop, sum(read.values()) + sum(written.values()), len(written))

    def size(self, size: Any) -> Expr:
        """A size by the batches' names."""
        if isinstance(size, int):
            return size
        return size.node.expr.subs(self._symbols)

    def shape(self, node: Any) -> list[Expr]:
        assert isinstance(node, fx.Node)
        return [self.size(s) for s in value(node).shape]

    def numel(self, node: fx.Node) -> Expr:
        tensors = [t for t in pytree.tree_leaves(value(node)) if isinstance(t, Tensor)]
        return sum(math.prod((self.size(s) for s in t.shape), start=sympy.Integer(1))
                   for t in tensors)  # fmt: skip

    def bytes(self, node: fx.Node) -> Expr:
        """Of a tensor, repeated elements once."""
        while node.target is aten.expand.default:
            node = node.all_input_nodes[0]
        tensors = [t for t in pytree.tree_leaves(value(node)) if isinstance(t, Tensor)]
        width = tensors[0].element_size() if tensors else 0
        return self.numel(node) * width


def _stored(node: fx.Node) -> fx.Node:
    """Where the elements of a view lie."""
    while node.target in VIEWS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def users(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a value, also through views."""
    for user in node.users:
        if user.target in VIEWS:
            yield from users(user)
        else:
            yield user


def is_fused(node: fx.Node) -> bool:
    """Whether a compiler makes one loop of the op and what it reads."""
    rule = RULES.get(node.target)
    return rule is not None and rule.reason in FUSED


FUSED = ("element-wise", "a copy, element by element", "a reduction within each row",
         "normalises within each row")  # fmt: skip
VIEWS = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default,
    aten.transpose.int, aten.t.default, aten.slice.Tensor, aten.select.int, aten.expand.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default,
    aten.flatten.using_ints, aten.unflatten.int, aten.split.Tensor, aten.split_with_sizes.default,
    aten.unbind.int, aten.sym_size.int, operator.getitem, operator.mul, operator.add,
}  # fmt: skip


def _product(c: _Costs, node: fx.Node) -> Expr:
    """2 * the result * what is summed over."""
    named = named_arguments(node)
    left = next(named[n] for n in ("mat1", "batch1", "input", "x") if n in named) if (
        node.target not in (aten.mm.default, aten.bmm.default, aten.matmul.default)
    ) else node.args[0]  # fmt: skip
    return 2 * c.numel(node) * c.shape(left)[-1]


def _einsum(c: _Costs, node: fx.Node) -> Expr:
    equation, operands = node.args[:2]
    assert isinstance(equation, str) and isinstance(operands, (list, tuple))
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, Expr] = {}
    for term, n in zip(terms, operands, strict=True):
        sizes |= dict(zip(term.replace(".", ""), c.shape(n)[-len(term.replace(".", "")) :],
                          strict=False))  # fmt: skip
    return 2 * math.prod(sizes.values(), start=sympy.Integer(1))


def _bilinear(c: _Costs, node: fx.Node) -> Expr:
    named = named_arguments(node)
    rows = math.prod(c.shape(named["input1"])[:-1], start=sympy.Integer(1))
    return 2 * rows * math.prod(c.shape(named["weight"]), start=sympy.Integer(1))


def _attention(c: _Costs, node: fx.Node) -> Expr:
    named = named_arguments(node)
    length = c.shape(named["key"])[-2]
    return 2 * length * (c.numel(named["query"]) + c.numel(node))


def _candidate_attention(c: _Costs, node: fx.Node) -> Expr:
    q, k = node.args[:2]
    assert isinstance(q, fx.Node)
    return 2 * c.shape(k)[-3] * (c.numel(q) + c.numel(node))


def _two_sides(c: _Costs, node: fx.Node) -> Expr:
    named = named_arguments(node)
    columns = c.shape(node)[-1] if "e_cand" in named else 1
    total: Expr = 0
    for x, w in (("e_cand", "w_cand"), ("e_user", "w_user"), ("x_cand", "w_cand"),
                 ("x_user", "w_user")):  # fmt: skip
        if x in named and w in named:
            rows = c.shape(named[x])[0]
            total += 2 * rows * columns * math.prod(c.shape(named[w]), start=sympy.Integer(1))
    return total


def _none(c: _Costs, node: fx.Node) -> Expr:
    return 0


FLOP: dict[Any, Callable[[_Costs, fx.Node], Expr]] = {
    **dict.fromkeys(
        (aten.linear.default, aten.addmm.default, aten.mm.default, aten.bmm.default,
         aten.matmul.default, aten.baddbmm.default, ikbo.linear_act.default),
        _product,
    ),
    aten.einsum.default: _einsum,
    aten.bilinear.default: _bilinear,
    aten.scaled_dot_product_attention.default: _attention,
    ikbo.candidate_attention.default: _candidate_attention,
    **dict.fromkeys(
        (ikbo.linear_compression.default, ikbo.linear_compression_add.default,
         ikbo.concat_linear.default, ikbo.concat_linear_add.default),
        _two_sides,
    ),
    ikbo.group_candidates.default: _none,
}  # fmt: skip
# Of ops that launch several: users' part, weights packed, candidates' part, parts of it added.
LAUNCHES: dict[Any, int] = {
    ikbo.concat_linear.default: 2,
    ikbo.linear_compression.default: 3,
    ikbo.candidate_attention.default: 2,
}
