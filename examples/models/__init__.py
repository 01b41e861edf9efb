"""Ranking models in plain PyTorch, which copy the user to each candidate as people write it.

``ikbo.rewrite`` takes the copies out; docs/rewrite.md shows how.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import ikbo

from .dcnv2 import DCNv2
from .din import DIN
from .dlrm import DLRM
from .layers import SMALL, Sizes
from .target_attention import TargetAttention
from .two_contexts import TwoContexts
from .wukong import Wukong

__all__ = ["DIN", "DLRM", "MODELS", "SMALL", "DCNv2", "Sizes", "TargetAttention", "TwoContexts",
           "Wukong", "arguments", "contexts"]  # fmt: skip

MODELS: dict[str, Callable[[Sizes], nn.Module]] = {
    "dlrm": DLRM,
    "dcnv2": DCNv2,
    "din": DIN,
    "wukong": Wukong,
    "target_attention": TargetAttention,
    "two_contexts": TwoContexts,
}
USER = ("user_dense", "user_ids", "history")


def arguments(
    model: nn.Module,
    sizes: Sizes,
    n_candidates: int,
    n_users: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Random arguments of a model by name, a candidate's user and query at random."""

    def ids(rows: int, n: int) -> Tensor:
        return torch.randint(0, sizes.vocabulary, (rows, n), device=device)

    n_queries = n_users + 1
    made = {
        "user_dense": torch.randn(n_users, sizes.dense_features, device=device, dtype=dtype),
        "history": ids(n_users, sizes.history),
        "user_ids": ids(n_users, sizes.user_features),
        "query_ids": ids(n_queries, sizes.query_features),
        "candidate_ids": ids(n_candidates, sizes.candidate_features),
        "user_index": torch.randint(0, n_users, (n_candidates,), device=device),
        "query_index": torch.randint(0, n_queries, (n_candidates,), device=device),
    }
    names = model.forward.__code__.co_varnames[1 : model.forward.__code__.co_argcount]
    return {name: made[name] for name in names}


def contexts(model: nn.Module, suffix: str = "index") -> dict[str, ikbo.Context]:
    """What the model's candidates share. A map's name that is no input, ``user_rows`` with
    ``suffix="rows"``, says that the inputs are copied already."""
    names = model.forward.__code__.co_varnames[1 : model.forward.__code__.co_argcount]
    user = [name for name in USER if name in names]
    result = {"user": ikbo.Context(user, f"user_{suffix}")}
    if "query_ids" in names:
        result["query"] = ikbo.Context(["query_ids"], f"query_{suffix}")
    return result
