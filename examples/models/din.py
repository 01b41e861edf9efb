"""DIN: the candidate weighs the user's history (Zhou et al., arXiv 1706.06978)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import Features, Sizes, mlp


class ActivationUnit(nn.Module):
    """How much each of the user's items matters to the candidate: [B, L, D], [B, D] -> [B, L]."""

    def __init__(self, dim: int, hidden: int = 36) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4 * dim, hidden), nn.PReLU(), nn.Linear(hidden, 1))

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        item = item.unsqueeze(1).expand(-1, history.shape[1], -1)
        joined = torch.cat([history, item, history - item, history * item], -1)
        return self.layers(joined).squeeze(-1)


class DIN(nn.Module):
    """forward(history [U, L], user_ids [U, F], candidate_ids [B, G], user_index [B]) -> [B]

    Item 0 of the history is padding; a candidate's first id is its item. Without ``user_index`` the
    user's inputs have a row for each candidate already.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.items = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.user, self.candidate = (
            Features(n, sizes) for n in (sizes.user_features, sizes.candidate_features)
        )
        self.unit = ActivationUnit(sizes.dim)
        self.mlp = mlp((sizes.features + 2) * sizes.dim, sizes.mlp)

    def forward(
        self,
        history: Tensor,
        user_ids: Tensor,
        candidate_ids: Tensor,
        user_index: Tensor | None = None,
    ) -> Tensor:
        if user_index is not None:
            history, user_ids = history[user_index], user_ids[user_index]
        items, item = self.items(history), self.items(candidate_ids[:, 0])
        weights = self.unit(items, item).masked_fill(history == 0, 0.0)
        interest = (weights.unsqueeze(-1) * items).sum(1)
        user, candidate = self.user(user_ids).flatten(1), self.candidate(candidate_ids).flatten(1)
        return self.mlp(torch.cat([user, interest, item, candidate], 1)).squeeze(1)
