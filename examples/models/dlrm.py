"""DLRM: dot products among all pairs of feature vectors (Naumov et al., arXiv 1906.00091)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import Features, Sizes, mlp


class DLRM(nn.Module):
    """forward(user_dense [U, dense], user_ids [U, F], candidate_ids [B, G], user_index [B]) -> [B]

    Without ``user_index`` the user's inputs have a row for each candidate already.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.user, self.candidate = (
            Features(n, sizes) for n in (sizes.user_features, sizes.candidate_features)
        )
        self.bottom = mlp(sizes.dense_features, (sizes.dim, sizes.dim), None)
        n = sizes.features + 1
        self.top = mlp(sizes.dim + n * (n - 1) // 2, sizes.mlp)

    def forward(
        self,
        user_dense: Tensor,
        user_ids: Tensor,
        candidate_ids: Tensor,
        user_index: Tensor | None = None,
    ) -> Tensor:
        if user_index is not None:
            user_dense, user_ids = user_dense[user_index], user_ids[user_index]
        dense = self.bottom(user_dense)
        rows = torch.cat([dense[:, None], self.user(user_ids), self.candidate(candidate_ids)], 1)
        dots = torch.bmm(rows, rows.transpose(1, 2))
        n = rows.shape[1]
        i, j = torch.tril_indices(n, n, -1, device=dots.device)
        return self.top(torch.cat([dense, dots[:, i, j]], 1)).squeeze(1)
