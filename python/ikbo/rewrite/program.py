"""The rewritten program and its report, put together."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    TensorArgument,
)
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils import _pytree as pytree

from . import verify
from .algebra import algebra
from .broadcasts import Form
from .context import Context, Inputs
from .cost import is_fused, users
from .engine import Rewriter
from .exporting import Seeds, exported, seeds_of_program, sources_of
from .lineage import CANDIDATES, trace_lineage
from .merging import merge_products
from .report import Copy, Report
from .rules import value
from .split import split_program


def rewritten(
    model: nn.Module | ExportedProgram,
    example_inputs: Inputs,
    contexts: Mapping[str, Context],
    candidate_inputs: Sequence[str],
    split: bool,
) -> tuple[Any, ...]:
    """What :func:`ikbo.rewrite` returns."""
    sources = sources_of(contexts, candidate_inputs)
    if isinstance(model, ExportedProgram):
        program = model.run_decompositions({})
        seeds = seeds_of_program(program, sources, contexts)
    else:
        program, seeds = exported(model, example_inputs, contexts, sources)
    maps = {c.map: name for name, c in contexts.items() if c.map}
    new, report = _rewritten(program, seeds, maps, example_inputs)
    if not split:
        return new, report
    return new, report, split_program(new, seeds.sources, report.inputs)


def _rewritten(
    program: ExportedProgram, seeds: Seeds, maps: Mapping[str, str], example_inputs: Inputs
) -> tuple[ExportedProgram, Report]:
    graph, signature = program.graph, program.graph_signature
    lineages = trace_lineage(graph, seeds.sources, seeds.across, seeds.jagged)
    sizes: dict[str, Any] = {}
    for node in graph.find_nodes(op="placeholder"):
        source = seeds.sources.get(node.name, CANDIDATES)
        if source == CANDIDATES or node.name in seeds.jagged:
            continue
        if isinstance(value(node), Tensor) and value(node).dim():
            sizes.setdefault(source, value(node).shape[0])
    fake_mode = detect_fake_mode([value(n) for n in graph.nodes if isinstance(value(n), Tensor)])
    symbols = _input_symbols(graph)
    constants = {
        name: program.constants[of]
        for name, of in signature.inputs_to_lifted_tensor_constants.items()
    }
    first = str(signature.user_inputs[0])
    rewriter = Rewriter(graph, lineages, sizes, algebra, fake_mode, constants, first)
    new_graph = rewriter.run()
    merge_products(rewriter, {str(n) for n in signature.user_inputs})
    if _input_symbols(graph) != symbols:
        raise RuntimeError(
            "ikbo.rewrite: expected the rewritten program to take all the sizes that the original "
            "takes, but an op in it holds for the example's only. Please report the model."
        )
    new_constants = {n.name: t for n, t in rewriter.new_constants.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch copies its own deprecated specs
        rewritten = program._update(
            fx.GraphModule(program.graph_module, new_graph),
            _signature(signature, new_graph, list(new_constants)),
            constants={**program.constants, **new_constants},
        )
    names = {n.name: str(lineage) for n, lineage in lineages.items()}
    copies = tuple(_copy(*found) for found in rewriter.builder.copies())
    known = {n: verify.Map(context, Form.INDEX, False) for n, context in maps.items()}
    inputs = _inputs(program, seeds, {**known, **rewriter.maps}, example_inputs)
    return rewritten, Report(program, rewritten, rewriter.entries, names, copies, inputs)


def _copy(node: fx.Node, source: fx.Node) -> Copy:
    readers = list(users(node))
    fused = all(is_fused(u) for u in readers)
    return Copy(node.name, source.name, fused, tuple(dict.fromkeys(str(u.target) for u in readers)))


def _inputs(
    program: ExportedProgram, seeds: Seeds, maps: Mapping[str, verify.Map], given: Inputs
) -> verify.Inputs:
    """What verify needs to make up inputs."""
    names = program.graph_signature.user_inputs
    placeholders = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    fakes = {str(n): value(placeholders[n]) if n in placeholders else n for n in names}
    sizes: dict[str, Any] = {}
    elements: dict[str, Any] = {}
    for name, source in seeds.sources.items():
        fake, dim = fakes[name], seeds.dim(name)
        if isinstance(fake, Tensor) and fake.dim() > dim:
            size = fake.shape[dim]
            size = size.node.expr if isinstance(size, torch.SymInt) else size
            if name in seeds.jagged:
                elements[f"{name}_elements"] = size
            else:
                sizes.setdefault(source, size)
    arguments = program.example_inputs
    if arguments is None:
        arguments = ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})
    leaves, spec = pytree.tree_flatten(arguments)
    return verify.Inputs(fakes, tuple(leaves), spec, seeds.sources, dict(maps), sizes, elements)


def _input_symbols(graph: fx.Graph) -> list[Any]:
    """The symbols in the sizes of the inputs."""
    inputs = [value(n) for n in graph.find_nodes(op="placeholder")]
    return [free_symbols(t) for t in inputs if isinstance(t, Tensor)]


def _signature(
    old: ExportGraphSignature, graph: fx.Graph, constants: Sequence[str]
) -> ExportGraphSignature:
    """The signature with the names that the outputs have now, and new constants."""
    results = graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    specs = []
    for spec, result in zip(old.output_specs, results, strict=True):
        if isinstance(result, fx.Node) and hasattr(spec.arg, "name"):
            spec = dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=result.name))
        specs.append(spec)
    inputs = list(old.input_specs)
    first = next(i for i, s in enumerate(inputs) if s.kind is InputKind.USER_INPUT)
    inputs[first:first] = [
        InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name), name) for name in constants
    ]
    return ExportGraphSignature(input_specs=inputs, output_specs=specs)
