"""Wukong: stacked layers of compressed factorisation machines (Zhang et al., arXiv 2403.02545)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import Features, Sizes, mlp


class WukongLayer(nn.Module):
    """[B, n_in, D] -> [B, 2 n_out, D]: a factorisation machine beside a linear compression."""

    def __init__(self, n_in: int, n_out: int, dim: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.project = nn.Parameter(torch.randn(n_in, rank) / n_in**0.5)
        self.norm = nn.LayerNorm(n_in * rank)
        self.fm = mlp(n_in * rank, (hidden,), n_out * dim)
        self.compress, self.residual = nn.Linear(n_in, n_out), nn.Linear(n_in, 2 * n_out)
        self.out = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        # X (X' Y) instead of (X X') Y: linear in the number of features.
        products = x @ (x.transpose(1, 2) @ self.project)
        crossed = self.fm(self.norm(products.flatten(1))).unflatten(1, (-1, x.shape[2]))
        compressed = self.compress(x.transpose(1, 2)).transpose(1, 2)
        residual = self.residual(x.transpose(1, 2)).transpose(1, 2)
        return self.out(torch.cat([crossed, compressed], 1) + residual)


class Wukong(nn.Module):
    """forward(user_ids [U, F], candidate_ids [B, G], user_index [B]) -> [B]

    Without ``user_index`` the user's ids have a row for each candidate already.
    """

    def __init__(self, sizes: Sizes, layers: int = 2, n_out: int = 8, rank: int = 16) -> None:
        super().__init__()
        self.user, self.candidate = (
            Features(n, sizes) for n in (sizes.user_features, sizes.candidate_features)
        )
        n_in = [sizes.features] + [2 * n_out] * (layers - 1)
        self.layers = nn.Sequential(
            *(WukongLayer(n, n_out, sizes.dim, rank, sizes.mlp[-1]) for n in n_in)
        )
        self.mlp = mlp(2 * n_out * sizes.dim, sizes.mlp)

    def forward(
        self, user_ids: Tensor, candidate_ids: Tensor, user_index: Tensor | None = None
    ) -> Tensor:
        user = self.user(user_ids)
        if user_index is not None:
            index = user_index.view(-1, 1, 1).expand(-1, *user.shape[1:])
            user = user.gather(0, index)
        rows = torch.cat([user, self.candidate(candidate_ids)], 1)
        return self.mlp(self.layers(rows).flatten(1)).squeeze(1)
