"""What the models share: sizes, embedding tables, MLPs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How wide a model is."""

    user_features: int = 40
    candidate_features: int = 20
    query_features: int = 10
    dense_features: int = 13
    history: int = 1024
    dim: int = 128
    heads: int = 2
    mlp: tuple[int, ...] = (1024, 512, 256)
    vocabulary: int = 100  # of each feature

    @property
    def features(self) -> int:
        return self.user_features + self.candidate_features


SMALL = Sizes(3, 2, 2, 4, 6, 8, 2, (12, 6), 10)


class Features(nn.Module):
    """The embeddings of a row's categorical features: ids [rows, n] to [rows, n, dim]."""

    def __init__(self, n_features: int, sizes: Sizes) -> None:
        super().__init__()
        self.table = nn.Embedding(n_features * sizes.vocabulary, sizes.dim)
        # Each feature has rows of the table to itself.
        offsets = torch.arange(n_features) * sizes.vocabulary
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids + self.offsets)


def mlp(width: int, hidden: tuple[int, ...], out: int | None = 1) -> nn.Sequential:
    """Linears with ReLU between; with ``out``, a last one without."""
    layers: list[nn.Module] = []
    for n in hidden:
        layers += [nn.Linear(width, n), nn.ReLU()]
        width = n
    return nn.Sequential(*layers, *([] if out is None else [nn.Linear(width, out)]))
