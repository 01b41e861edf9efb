"""DCN V2: layers that cross features, beside a deep network (Wang et al., arXiv 2008.13535)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import Features, Sizes, mlp


class Cross(nn.Module):
    """``x0 * (W x + b) + x``, W a matrix or, with ``rank``, a product of two thin ones."""

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        self.weight: nn.Module = nn.Linear(width, width)
        if rank is not None:
            thin, wide = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)
            self.weight = nn.Sequential(thin, wide)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.weight(x) + x


class DCNv2(nn.Module):
    """forward(user_ids [U, F], candidate_ids [B, G], user_index [B]) -> [B]

    The paper's parallel form. Without ``user_index`` the user's ids have a row for each candidate
    already.
    """

    def __init__(self, sizes: Sizes, layers: int = 2, rank: int | None = 64) -> None:
        super().__init__()
        self.user, self.candidate = (
            Features(n, sizes) for n in (sizes.user_features, sizes.candidate_features)
        )
        width = sizes.features * sizes.dim
        self.crosses = nn.ModuleList(Cross(width, rank) for _ in range(layers))
        self.deep = mlp(width, sizes.mlp, None)
        self.out = nn.Linear(width + sizes.mlp[-1], 1)

    def forward(
        self, user_ids: Tensor, candidate_ids: Tensor, user_index: Tensor | None = None
    ) -> Tensor:
        user = self.user(user_ids).flatten(1)
        if user_index is not None:
            user = user.index_select(0, user_index)
        x0 = torch.cat([user, self.candidate(candidate_ids).flatten(1)], 1)
        x = x0
        for cross in self.crosses:
            x = cross(x0, x)
        return self.out(torch.cat([x, self.deep(x0)], 1)).squeeze(1)
