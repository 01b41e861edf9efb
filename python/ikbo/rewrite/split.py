"""A rewritten program in two: what depends on contexts only, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from .lineage import CANDIDATES
from .rules import aten, value
from .values import Builder
from .verify import Inputs

ikbo = torch.ops.ikbo


def split_program(
    program: ExportedProgram, sources: Mapping[str, str], inputs: Inputs
) -> tuple[ExportedProgram, ExportedProgram]:
    """The program of the contexts and that of the candidates.

    Args:
        sources: the batch of each input by the placeholder's name.
        inputs: examples of the program's inputs.
    """
    if any(s.kind is not OutputKind.USER_OUTPUT for s in program.graph_signature.output_specs):
        raise ValueError(
            "ikbo.rewrite: expected a model that updates no buffers to split, as in eval mode."
        )
    graph, sides = _with_parts(program, sources)
    (output,) = graph.find_nodes(op="output")
    results = output.args[0]
    needed = _needed(graph, sides)
    parts = {n: f"{_whose(sides[n])}_part_{i}" for i, n in enumerate(needed)}
    examples = dict(zip(inputs.fakes, inputs.examples, strict=True))
    halves = _Halves(program, graph, sides, {s: n for n, s in inputs.sizes.items()})
    user = halves.make({}, {name: n for n, name in parts.items()}, examples)
    with torch.no_grad():
        made = user.module()(**{n: examples[n] for n in _input_names(user)})
    assert isinstance(results, (list, tuple))
    structure = pytree.tree_unflatten(list(results), program.call_spec.out_spec)
    return user, halves.make(parts, structure, {**examples, **made})


def _with_parts(
    program: ExportedProgram, sources: Mapping[str, str]
) -> tuple[fx.Graph, dict[fx.Node, frozenset[str]]]:
    """The program with the users' products on their own, and the batches each value depends on."""
    inputs = {str(n) for n in program.graph_signature.user_inputs}
    tensors = [t for n in program.graph.nodes if isinstance(t := value(n), Tensor)]
    builder = Builder(detect_fake_mode(tensors))
    made: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        part = PARTS.get(node.target)
        if part is None:
            made[node] = builder.graph.node_copy(node, made.__getitem__)
        else:
            arguments = [made[a] if isinstance(a, fx.Node) else a for a in node.args]
            made[node] = part(builder, arguments)
    sides: dict[fx.Node, frozenset[str]] = {}
    for node in builder.graph.nodes:
        if node.op == "placeholder":
            source = sources.get(node.name) if node.name in inputs else None
            sides[node] = frozenset({source} if source else ())  # what is shared is for both
        else:
            sides[node] = frozenset().union(*(sides[n] for n in node.all_input_nodes))
    return builder.graph, sides


def _linear_part(b: Builder, args: list[Any]) -> fx.Node:
    x_cand, x_user, w_cand, w_user, bias, *rest = args
    part = b.call(aten.linear.default, x_user, w_user)
    return b.call(ikbo.concat_linear_add.default, x_cand, w_cand, part, bias, *rest)


def _compressed_part(b: Builder, args: list[Any]) -> fx.Node:
    e_cand, e_user, w_cand, w_user, bias, *rest = args
    part = b.call(aten.matmul.default, w_user, e_user)
    return b.call(ikbo.linear_compression_add.default, e_cand, w_cand, part, bias, *rest)


PARTS: dict[Any, Any] = {
    ikbo.concat_linear.default: _linear_part,
    ikbo.linear_compression.default: _compressed_part,
}


def _of_contexts(side: frozenset[str]) -> bool:
    return bool(side) and CANDIDATES not in side


def _whose(side: frozenset[str]) -> str:
    return next(iter(side)) if len(side) == 1 else "contexts"


def _needed(graph: fx.Graph, sides: Mapping[fx.Node, frozenset[str]]) -> list[fx.Node]:
    """The contexts' tensors that candidates or results need; sizes are taken from such tensors."""
    needed: dict[fx.Node, None] = {}
    sizes: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "output" and CANDIDATES not in sides[node]:
            continue
        for n in node.all_input_nodes:
            if _of_contexts(sides[n]):
                if isinstance(value(n), Tensor):
                    needed[n] = None
                else:
                    sizes.append(n)
    for size in sizes:
        if _with_size(list(needed), size) is None:
            needed[next(n for n in size.all_input_nodes if isinstance(value(n), Tensor))] = None
    return list(needed)


def _with_size(tensors: list[fx.Node], size: fx.Node) -> tuple[fx.Node, int] | None:
    """A tensor and its dimension of that size."""
    for n in tensors:
        for dim, s in enumerate(value(n).shape):
            if isinstance(s, torch.SymInt) and s.node.expr == value(size).node.expr:
                return n, dim
    return None


class _Halves:
    """Makes a program of a part of a graph."""

    def __init__(
        self,
        program: ExportedProgram,
        graph: fx.Graph,
        sides: Mapping[fx.Node, frozenset[str]],
        names: Mapping[Any, str],
    ) -> None:
        self._program, self._graph, self._sides, self._names = program, graph, sides, names
        self._dims: dict[Any, Any] = {}
        signature = program.graph_signature
        self._held = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }

    def make(
        self, given: Mapping[fx.Node, str], results: Any, examples: Mapping[str, Any]
    ) -> ExportedProgram:
        """The program of ``results``, a structure of nodes, from inputs and ``given``."""
        root, graph = nn.Module(), fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for node, name in given.items():
            made[node] = graph.placeholder(name)
            made[node].meta["val"] = value(node)
        nodes = [n for n in pytree.tree_leaves(results) if isinstance(n, fx.Node)]
        order = self._ancestors(nodes, set(given))
        for node in order:
            if node.op == "placeholder" and node.name not in self._held:
                made[node] = graph.placeholder(node.name)
                made[node].meta["val"] = value(node)
        for node in order:
            if node in made:
                continue
            if node.op == "placeholder":
                made[node] = graph.get_attr(_hold(root, self._held[node.name], self._program))
            else:
                made[node] = self._copied(graph, node, given, made)
        graph.output(pytree.tree_map(lambda n: made[n] if isinstance(n, fx.Node) else n, results))
        inputs = graph.find_nodes(op="placeholder")
        module = fx.GraphModule(root, graph)
        for name, _ in list(module.named_buffers()):
            owner, _, last = name.rpartition(".")
            if name not in self._program.state_dict:  # GraphModule registers all as persistent
                module.get_submodule(owner)._non_persistent_buffers_set.add(last)
        kwargs = {n.name: examples[n.name] for n in inputs}
        shapes = {n.name: self._dynamic(value(n)) for n in inputs}
        program = torch.export.export(module, (), kwargs, dynamic_shapes=shapes)
        return program.run_decompositions({})

    def _copied(
        self,
        graph: fx.Graph,
        node: fx.Node,
        given: Mapping[fx.Node, str],
        made: Mapping[fx.Node, fx.Node],
    ) -> fx.Node:
        if given and _of_contexts(self._sides[node]) and isinstance(value(node), torch.SymInt):
            found = _with_size(list(given), node)
            assert found is not None
            return graph.call_function(aten.sym_size.int, (made[found[0]], found[1]))
        return graph.node_copy(node, made.__getitem__)

    def _ancestors(self, nodes: list[fx.Node], given: set[fx.Node]) -> list[fx.Node]:
        wanted, stack = set(given), list(nodes)
        while stack:
            node = stack.pop()
            if node in wanted:
                continue
            wanted.add(node)
            size = isinstance(value(node), torch.SymInt)
            if not (given and size and _of_contexts(self._sides[node])):
                stack += node.all_input_nodes
        return [n for n in self._graph.nodes if n in wanted]

    def _dynamic(self, fake: Any) -> Any:
        if not isinstance(fake, Tensor):
            return None
        return {d: self._dim(s) for d, s in enumerate(fake.shape) if isinstance(s, torch.SymInt)}

    def _dim(self, size: Any) -> Any:
        name = self._names.get(size.node.expr)
        if name is None:
            return Dim.AUTO
        return self._dims.setdefault(name, Dim(name))


def _hold(root: nn.Module, name: str, program: ExportedProgram) -> str:
    """Puts a parameter, buffer or constant of a program under its name into a module."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    tensor = program.state_dict.get(name, program.constants.get(name))
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(last, tensor)
    else:
        root.register_buffer(last, tensor)
    return name


def _input_names(program: ExportedProgram) -> list[str]:
    return [str(n) for n in program.graph_signature.user_inputs]
