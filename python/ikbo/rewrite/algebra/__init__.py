"""What may be done with rows of different batches beside sinking: products split over them.

Each function takes the pass and an op and returns the new value with what was done and why, or None
where the algebra doesn't apply; the pass then sinks the op or leaves it.
"""

from __future__ import annotations

from torch import fx

from ..engine import Done, Rewriter
from . import (
    activations,
    attention,
    bilinear,
    concatenation,
    forms,
    linear,
    scores,
    sparse,
    stacks,
)
from .registry import ALGEBRA

__all__ = ["ALGEBRA", "activations", "algebra", "attention", "bilinear", "concatenation", "forms",
           "linear", "scores", "sparse", "stacks"]  # fmt: skip


def algebra(r: Rewriter, node: fx.Node) -> Done | None:
    """The first function that applies to an op, else the op on each part of a concatenation."""
    for function in (*ALGEBRA.get(node.target, ()), *ALGEBRA.get(str(node.target), ())):
        done = function(r, node)
        if done is not None:
            return done
    return concatenation.on_parts(r, node) or sparse.on_jagged(r, node)
