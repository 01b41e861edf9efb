"""The program of a model, exported with a symbolic size for each batch."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from .context import Context, Inputs
from .lineage import CANDIDATES


def sources_of(contexts: Mapping[str, Context], candidate_inputs: Sequence[str]) -> dict[str, str]:
    """The batch of each input by name."""
    if CANDIDATES in contexts:
        raise ValueError(f"ikbo.rewrite: expected a context by another name than {CANDIDATES!r}.")
    for names in (candidate_inputs, *(c.inputs for c in contexts.values())):
        if isinstance(names, str):
            raise ValueError(f"ikbo.rewrite: expected a list of names, got {names!r}.")
    sources = dict.fromkeys(candidate_inputs, CANDIDATES)
    for name, context in contexts.items():
        for given in (*context.inputs, *context.jagged):
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


@dataclasses.dataclass(frozen=True)
class Seeds:
    """What is known of a program's placeholders by name.

    Attributes:
        sources: the batch of each, a context's name or ``"candidates"``; the others are shared.
        across: those whose rows stand in dimension 1, not 0: a map for each of several features.
        jagged: those that hold rows of different lengths one after another.
    """

    sources: Mapping[str, str]
    across: frozenset[str] = frozenset()
    jagged: frozenset[str] = frozenset()

    def dim(self, name: str) -> int:
        """Where the rows stand."""
        return 1 if name in self.across else 0


def seeds_of_program(
    program: ExportedProgram, sources: Mapping[str, str], contexts: Mapping[str, Context]
) -> Seeds:
    """The seeds of an exported program, whose placeholders' names are those of the inputs."""
    inputs = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    known = {str(n) for n in program.graph_signature.user_inputs}
    _check_names(sources, known)
    maps = {c.map for c in contexts.values() if c.map}
    across = {n for n in maps & set(sources) if inputs[n].meta["val"].dim() == 2}
    return Seeds(sources, frozenset(across), _jagged(contexts))


def _jagged(contexts: Mapping[str, Context]) -> frozenset[str]:
    return frozenset(n for c in contexts.values() for n in c.jagged)


def exported(
    model: nn.Module,
    example_inputs: Inputs,
    contexts: Mapping[str, Context],
    sources: dict[str, str],
) -> tuple[ExportedProgram, Seeds]:
    """The program of a module, and what is known of its placeholders."""
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (
        tuple(example_inputs), {})  # fmt: skip
    signature = inspect.signature(model.forward)
    lifted = {n: c for n, c in contexts.items() if c.map and c.map not in signature.parameters}
    if lifted:
        model = _lift(model, signature, lifted)
        bound = signature.bind(*args, **kwargs)
        maps = _lifted_examples(bound, lifted)
        given = bound.arguments
        kwargs = {**({n: given[n] for n in kwargs} if not args else bound.kwargs), **maps}
        args = bound.args if args else ()
        signature = inspect.signature(model.forward)
    # Placeholders come in the order of the arguments.
    kwargs = {n: kwargs[n] for n in (*signature.parameters, *kwargs) if n in kwargs}
    given = signature.bind(*args, **kwargs).arguments
    _check_names(sources, set(given))
    names_of_maps = {c.map for c in contexts.values() if c.map}
    across = {
        n
        for n in names_of_maps & set(given)
        if isinstance(given[n], Tensor) and given[n].dim() == 2
    }
    for name, source in sources.items():
        dim = 1 if name in across else 0
        rows = [t.shape[dim] for t in pytree.tree_leaves(given[name])
                if isinstance(t, Tensor) and t.dim()]  # fmt: skip
        if any(r < 2 for r in rows):
            raise ValueError(
                f"ikbo.rewrite: expected examples of at least 2 rows for {source}, got "
                f"{min(rows)} in {name!r}: a size of 1 would be taken as a constant."
            )
    dims = {source: Dim(source) for source in set(sources.values())}
    jagged = _jagged(contexts)

    def dynamic(name: str) -> Any:
        dim, at = dims.get(sources.get(name, "")), 1 if name in across else 0
        if name in jagged:
            dim = Dim(f"{name}_elements")
        return pytree.tree_map(
            lambda t: {at: dim} if dim and isinstance(t, Tensor) and t.dim() else None, given[name]
        )

    shapes = {name: dynamic(name) for name in given}
    program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    program = program.run_decompositions({})
    names = [n for n, v in given.items() for _ in pytree.tree_leaves(v)]
    specs = [s for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    by_name = {s.arg.name: n for n, s in zip(names, specs, strict=True) if n in sources}
    return program, Seeds(
        {placeholder: sources[n] for placeholder, n in by_name.items()},
        frozenset(placeholder for placeholder, n in by_name.items() if n in across),
        frozenset(placeholder for placeholder, n in by_name.items() if n in jagged),
    )


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
) -> dict[str, Tensor]:
    """Maps, and the contexts' own rows in place of examples with a row for each candidate."""
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
    return maps
