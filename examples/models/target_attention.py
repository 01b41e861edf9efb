"""A ranker whose candidates attend over their user's long history."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Features, Sizes, mlp


class TargetAttention(nn.Module):
    """forward(history [U, L], user_ids [U, F], candidate_ids [B, G], user_index [B]) -> [B]

    A candidate's first id is its item. Without ``user_index`` the user's inputs have a row for each
    candidate already.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.items = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.positions = nn.Parameter(torch.randn(sizes.history, sizes.dim) / sizes.dim**0.5)
        self.user, self.candidate = (
            Features(n, sizes) for n in (sizes.user_features, sizes.candidate_features)
        )
        self.heads = sizes.heads
        self.norm = nn.LayerNorm(sizes.dim)
        self.q, self.k, self.v, self.o = (nn.Linear(sizes.dim, sizes.dim) for _ in range(4))
        self.mlp = mlp((sizes.features + 2) * sizes.dim, sizes.mlp)

    def forward(
        self,
        history: Tensor,
        user_ids: Tensor,
        candidate_ids: Tensor,
        user_index: Tensor | None = None,
    ) -> Tensor:
        items = self.norm(self.items(history) + self.positions)
        user = self.user(user_ids).flatten(1)
        if user_index is not None:
            items, user = items[user_index], user[user_index]
        item = self.items(candidate_ids[:, 0])
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, x in ((self.q, item.unsqueeze(1)), (self.k, items), (self.v, items))
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1)
        interest, candidate = self.o(attended), self.candidate(candidate_ids).flatten(1)
        return self.mlp(torch.cat([user, interest, item, candidate], 1)).squeeze(1)
