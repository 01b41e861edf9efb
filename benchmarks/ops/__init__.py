"""The cases of every op, a module each."""

from __future__ import annotations

import importlib

from ..cases import Case

OPS = (
    "linear_compression",
    "concat_linear",
    "candidate_attention",
    "norms",
    "gated_mlp",
    "tower",
    "group_candidates",
    "gemm",
    "models",
)


def cases(op: str, shrink: int = 1) -> list[Case]:
    """The cases of an op; with ``shrink``, every size divided by it (for a test of the makers)."""
    module = importlib.import_module(f".{op}", __name__)
    result: list[Case] = module.cases(lambda size: max(1, size // shrink))
    return result


def note(op: str) -> str:
    """What the report says above an op's table; mostly nothing."""
    module = importlib.import_module(f".{op}", __name__)
    result: str = getattr(module, "NOTE", "")
    return result
