"""An MLP ranker of candidates that share a user and, each in another grouping, a query."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import Features, Sizes, mlp


class TwoContexts(nn.Module):
    """forward(user_ids [U, F], query_ids [Q, E], candidate_ids [B, G], user_index [B],
    query_index [B]) -> [B]

    Without the indices the inputs of users and queries have a row for each candidate already.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        features = (sizes.user_features, sizes.query_features, sizes.candidate_features)
        self.user, self.query, self.candidate = (Features(n, sizes) for n in features)
        self.tower = mlp(sizes.query_features * sizes.dim, (sizes.dim,), sizes.dim)
        width = (sizes.features + 1) * sizes.dim
        self.mlp = mlp(width, sizes.mlp)

    def forward(
        self,
        user_ids: Tensor,
        query_ids: Tensor,
        candidate_ids: Tensor,
        user_index: Tensor | None = None,
        query_index: Tensor | None = None,
    ) -> Tensor:
        if user_index is not None and query_index is not None:
            user_ids, query_ids = user_ids[user_index], query_ids[query_index]
        user, candidate = self.user(user_ids).flatten(1), self.candidate(candidate_ids).flatten(1)
        query = self.tower(self.query(query_ids).flatten(1))
        return self.mlp(torch.cat([user, query, candidate], 1)).squeeze(1)
