"""`rewrite`: a model that copies its contexts' rows in, the same without the copies out.

Importing this costs next to nothing: the pass itself is imported when it is first called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Union, overload

from torch import nn

from .context import Context, Inputs

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from .report import Report

Model = Union[nn.Module, "ExportedProgram"]
Contexts = Mapping[str, Context]
Split = tuple["ExportedProgram", "ExportedProgram"]


@overload
def rewrite(
    model: Model,
    example_inputs: Inputs,
    contexts: Contexts,
    candidate_inputs: Sequence[str],
    *,
    split: Literal[False] = False,
) -> tuple[ExportedProgram, Report]: ...


@overload
def rewrite(
    model: Model,
    example_inputs: Inputs,
    contexts: Contexts,
    candidate_inputs: Sequence[str],
    *,
    split: Literal[True],
) -> tuple[ExportedProgram, Report, Split]: ...


def rewrite(
    model: Model,
    example_inputs: Inputs,
    contexts: Contexts,
    candidate_inputs: Sequence[str],
    *,
    split: bool = False,
) -> tuple[ExportedProgram, Report] | tuple[ExportedProgram, Report, Split]:
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
        split: whether to return the program in two as well.

    Returns:
        The rewritten program, which shares the model's parameters under their names, and the
        :class:`Report`. With ``split``, also ``(user_program, candidate_program)``: the user
        program takes the contexts' inputs and returns what the candidate program needs of them, a
        mapping by name; the candidate program takes the other inputs and these. Both take keywords,
        and leaves of nested inputs by their placeholders' names::

            parts = user_program.module()(user=user)
            scores = candidate_program.module()(candidate=candidate, user_index=index, **parts)

    Raises:
        ValueError: the names don't fit the model's inputs, or an example has too few rows.
    """
    from .program import rewritten

    return rewritten(model, example_inputs, contexts, candidate_inputs, split)
