"""`rewrite`: a model that copies its contexts' rows in, the same without the copies out."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    TensorArgument,
)
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils import _pytree as pytree

from .algebra import algebra
from .engine import Rewriter
from .lineage import CANDIDATES, trace_lineage
from .report import Report
from .rules import value


@dataclasses.dataclass(frozen=True)
class Context:
    """What many candidates share: a user, a session, a query, a vendor.

    Attributes:
        inputs: names of the model's inputs whose dimension 0 are the context's rows.
        map: name of the input that holds the context's row of each candidate, an integer vector. If
            the model has no such input, its context inputs are taken to be copied already, a row
            for each candidate; the rewritten program then takes the context's rows, and the map as
            a keyword. None where the model copies rows without a map.
    """

    inputs: Sequence[str]
    map: str | None = None


Inputs = tuple[Any, ...] | Mapping[str, Any]


def rewrite(
    model: nn.Module | ExportedProgram,
    example_inputs: Inputs,
    contexts: Mapping[str, Context],
    candidate_inputs: Sequence[str],
) -> tuple[ExportedProgram, Report]:
    """Moves copies of a context's rows past every op for which that is proved to be the same.

    Ops on rows one by one then run once per row of the context; products over a concatenation of
    context and candidates become :func:`ikbo.concat_linear` and :func:`ikbo.linear_compression`,
    attention over copied keys and values :func:`ikbo.candidate_attention`. Where nothing is proved
    the copy is made, just before the op; the report says which and why.

    Ops that have moved run on every row of a context, also on those without a candidate: all must
    be valid inputs, such as indices within their table. An index out of a map's range, for which
    the model raises, gives NaN rows or raises; -1, where the model uses ``index_select``, gives
    rows without a context, as in the ops, or raises.

    Args:
        model: in the mode, eval or training, in which it is to run; or an exported program, whose
            placeholders' names are then the names of the inputs.
        example_inputs: a tuple, or a mapping by name; at least two rows of each batch.
        contexts: by name. Inputs not named anywhere are shared by all rows.
        candidate_inputs: names of inputs with a row for each candidate.

    Returns:
        The rewritten program, which shares the model's parameters under their names, and the
        :class:`Report`.

    Raises:
        ValueError: the names don't fit the model's inputs, or an example has too few rows.
    """
    sources = _sources(contexts, candidate_inputs)
    if isinstance(model, ExportedProgram):
        program, seeds = model.run_decompositions({}), sources
        known = {s.arg.name for s in model.graph_signature.input_specs
                 if s.kind is InputKind.USER_INPUT and hasattr(s.arg, "name")}  # fmt: skip
        _check_names(sources, known)
    else:
        program, seeds = _exported(model, example_inputs, contexts, sources)
    return _rewritten(program, seeds)


def _sources(contexts: Mapping[str, Context], candidate_inputs: Sequence[str]) -> dict[str, str]:
    """The batch of each input by name."""
    if CANDIDATES in contexts:
        raise ValueError(f"ikbo.rewrite: expected a context by another name than {CANDIDATES!r}.")
    sources = dict.fromkeys(candidate_inputs, CANDIDATES)
    for name, context in contexts.items():
        for given in context.inputs:
            if given in sources:
                raise ValueError(
                    f"ikbo.rewrite: expected input {given!r} in one batch, got it in {name!r} and "
                    f"{sources[given]!r}."
                )
            sources[given] = name
    for context in contexts.values():
        if context.map is not None:
            sources.setdefault(context.map, CANDIDATES)
    return sources


def _check_names(sources: Mapping[str, str], known: set[str]) -> None:
    unknown = sorted(set(sources) - known)
    if unknown:
        raise ValueError(
            f"ikbo.rewrite: expected names of inputs ({', '.join(sorted(known))}), got "
            f"{', '.join(unknown)}."
        )


def _exported(
    model: nn.Module,
    example_inputs: Inputs,
    contexts: Mapping[str, Context],
    sources: dict[str, str],
) -> tuple[ExportedProgram, dict[str, str]]:
    """The program of a module, and the batch of each placeholder."""
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (
        tuple(example_inputs), {})  # fmt: skip
    signature = inspect.signature(model.forward)
    lifted = {n: c for n, c in contexts.items() if c.map and c.map not in signature.parameters}
    if lifted:
        model = _lift(model, signature, lifted)
        args, kwargs = _lifted_examples(signature.bind(*args, **kwargs), lifted)
        signature = inspect.signature(model.forward)
    given = signature.bind(*args, **kwargs).arguments
    _check_names(sources, set(given))
    for name, source in sources.items():
        rows = [t.shape[0] for t in pytree.tree_leaves(given[name])
                if isinstance(t, Tensor) and t.dim()]  # fmt: skip
        if any(r < 2 for r in rows):
            raise ValueError(
                f"ikbo.rewrite: expected examples of at least 2 rows for {source}, got "
                f"{min(rows)} in {name!r}: a size of 1 would be taken as a constant."
            )
    dims = {source: Dim(source) for source in set(sources.values())}

    def dynamic(name: str) -> Any:
        dim = dims.get(sources.get(name, ""))
        return pytree.tree_map(
            lambda t: {0: dim} if dim and isinstance(t, Tensor) and t.dim() else None, given[name]
        )

    shapes = {name: dynamic(name) for name in given}
    program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    program = program.run_decompositions({})
    names = [n for n, v in given.items() for _ in pytree.tree_leaves(v)]
    specs = [s for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    seeds = {s.arg.name: sources[n] for n, s in zip(names, specs, strict=True) if n in sources}
    return program, seeds


def _lift(
    model: nn.Module, signature: inspect.Signature, contexts: Mapping[str, Context]
) -> nn.Module:
    """The model, copying the rows of its contexts itself, by maps that it takes as keywords."""
    maps = list(dict.fromkeys(c.map for c in contexts.values() if c.map))
    plain = type(model).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        rows = {m: kwargs.pop(m) for m in maps}
        bound = signature.bind(*args, **kwargs)
        for context in contexts.values():
            assert context.map is not None
            index = rows[context.map]
            for name in context.inputs:
                bound.arguments[name] = pytree.tree_map(
                    lambda t, index=index: t.index_select(0, index), bound.arguments[name]
                )
        return plain(self, *bound.args, **bound.kwargs)

    extra = [inspect.Parameter(m, inspect.Parameter.KEYWORD_ONLY) for m in maps]
    given = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    if any(p.kind is p.POSITIONAL_ONLY for p in given):
        own = own.replace(kind=inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([own, *given, *extra])  # type: ignore[attr-defined]
    # The same parameters under the same names: a shallow copy of another class.
    lifted = copy.copy(model)
    lifted.__class__ = type(type(model).__name__, (type(model),), {"forward": forward})
    return lifted


def _lifted_examples(
    bound: inspect.BoundArguments, contexts: Mapping[str, Context]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Examples of the contexts' own rows from examples with a row for each candidate."""
    maps: dict[str, Tensor] = {}
    n_rows = 2
    for context in contexts.values():
        assert context.map is not None
        for name in context.inputs:
            if name not in bound.arguments:
                raise ValueError(f"ikbo.rewrite: expected an example of {name!r}, got none.")
            leaves = pytree.tree_leaves(bound.arguments[name])
            n = leaves[0].shape[0]
            maps[context.map] = torch.arange(n, device=leaves[0].device) % n_rows
            bound.arguments[name] = pytree.tree_map(lambda t: t[:n_rows], bound.arguments[name])
    return bound.args, {**bound.kwargs, **maps}


def _rewritten(
    program: ExportedProgram, seeds: Mapping[str, str]
) -> tuple[ExportedProgram, Report]:
    graph = program.graph
    lineages = trace_lineage(graph, seeds)
    sizes: dict[str, Any] = {}
    for node in graph.find_nodes(op="placeholder"):
        source = seeds.get(node.name)
        if (
            source
            and source != CANDIDATES
            and isinstance(value(node), Tensor)
            and value(node).dim()
        ):
            sizes.setdefault(source, value(node).shape[0])
    fake_mode = detect_fake_mode([value(n) for n in graph.nodes if isinstance(value(n), Tensor)])
    symbols = _input_symbols(graph)
    signature = program.graph_signature
    constants = {
        name: program.constants[of]
        for name, of in signature.inputs_to_lifted_tensor_constants.items()
    }
    first = signature.user_inputs[0]
    assert isinstance(first, str)
    rewriter = Rewriter(graph, lineages, sizes, algebra, fake_mode, constants, first)
    new_graph = rewriter.run()
    if _input_symbols(graph) != symbols:
        raise RuntimeError(
            "ikbo.rewrite: expected the rewritten program to take all the sizes that the original "
            "takes, but an op in it holds for the example's only. Please report the model."
        )
    module = fx.GraphModule(program.graph_module, new_graph)
    new_constants = {n.name: t for n, t in rewriter.new_constants.items()}
    rewritten = program._update(
        module,
        _signature(signature, new_graph, list(new_constants)),
        constants={**program.constants, **new_constants},
    )
    copies = tuple(f"{copy.name} of {source.name}" for copy, source in rewriter.builder.copies())
    names = {n.name: str(lineage) for n, lineage in lineages.items()}
    return rewritten, Report(program, rewritten, rewriter.entries, names, copies)


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
