"""A small ranking model in plain PyTorch, which scores the usual way: a copy of the user for each
candidate."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from movielens import History, MovieLens
from torch import Tensor, nn


class UserSide(NamedTuple):
    """What the layers read of each user: one row a user, however many candidates there are."""

    rows: Tensor  # [U, Ku, N]: user, age, gender, occupation
    keys: Tensor  # [U, L, H, D] of the watch history
    values: Tensor  # [U, L, H, D]
    length: Tensor  # int32 [U]: how much of the history is there

    def per_candidate(self, cand_to_user: Tensor) -> UserSide:
        """A copy for every candidate: what ikbo.rewrite takes out."""
        return UserSide(*(t.index_select(0, cand_to_user) for t in self))

    def nbytes(self) -> int:
        return sum(t.nbytes for t in self)


class RankingModel(nn.Module):
    """Embeddings -> linear compression and attention over the history -> MLP -> one score.

    The sigmoid of the score is the expected rating, from 0 for one star to 1 for five.

    Args:
        data: gives the numbers of users, movies and so on, and the movies' genres and years.
        width: N, the width of every embedding.
        heads: H of the attention; D = N / H.
        compressed: M, the rows that the stacked embeddings are compressed to.
        hidden: the width of the MLP.
        dropout: on the embeddings and inside the MLP, in training.
    """

    def __init__(
        self,
        data: MovieLens,
        width: int = 32,
        heads: int = 1,
        compressed: int = 4,
        hidden: int = 64,
        dropout: float = 0.3,
    ) -> None:
        super().__init__()
        for name in ("traits", "years", "genres"):
            self.register_buffer(name, getattr(data, name), persistent=False)
        counts = [len(data.traits), *(int(n) + 1 for n in data.traits.amax(0))]
        self.user_embeddings = nn.ModuleList(nn.Embedding(n, width) for n in counts)
        self.movie = nn.Embedding(len(data.titles), width)
        self.year = nn.Embedding(int(data.years.max()) + 1, width)
        # The mean of the embeddings of a movie's genres.
        self.genre = nn.Linear(data.genres.shape[1], width, bias=False)
        self.rated = nn.Embedding(6, width)
        self.heads = heads
        self.key, self.value, self.query = (nn.Linear(width, width) for _ in range(3))
        n_rows = len(counts) + 3
        self.compress = nn.Linear(n_rows, compressed)
        n_features = (n_rows + compressed + 2) * width
        self.mlp_in = nn.Linear(n_features, hidden)
        self.mlp_out = nn.Linear(hidden, 1)
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)

    def user_side(self, users: Tensor, history: History) -> UserSide:
        ids = [users, *self.traits[users].unbind(1)]
        rows = torch.stack([e(i) for e, i in zip(self.user_embeddings, ids, strict=True)], 1)
        watched = self._movie_rows().sum(1)[history.movies] + self.rated(history.ratings)
        keys, values = (
            layer(watched).unflatten(-1, (self.heads, -1)) for layer in (self.key, self.value)
        )
        return UserSide(self.dropout(rows), keys, values, history.length)

    def candidate_rows(self, movies: Tensor) -> Tensor:
        """[B, 3, N]: movie, genres, year."""
        return self.dropout(self._movie_rows()[movies])

    def forward(self, user: UserSide, candidates: Tensor) -> Tensor:
        """Row b of every user tensor belongs to candidate b. [B, 3, N] -> [B]."""
        stacked = torch.cat([user.rows, candidates], 1)
        compressed = F.gelu(self.compress(stacked.mT).mT)
        seen = torch.arange(user.keys.shape[1], device=user.keys.device) < user.length[:, None]
        attended = F.scaled_dot_product_attention(
            self._query(candidates).transpose(1, 2),
            user.keys.transpose(1, 2),
            user.values.transpose(1, 2),
            attn_mask=seen[:, None, None],
        ).flatten(1)
        features = [user.rows, candidates, compressed, attended, attended * candidates.sum(1)]
        hidden = F.gelu(self.mlp_in(torch.cat([f.flatten(1) for f in features], 1)))
        return self.mlp_out(self.dropout(hidden)).squeeze(1)

    def _movie_rows(self) -> Tensor:
        """[movies, 3, N]"""
        return torch.stack([self.movie.weight, self.genre(self.genres), self.year(self.years)], 1)

    def _query(self, candidates: Tensor) -> Tensor:
        """[B, 1, H, D]: what a candidate asks of the history."""
        return self.query(candidates.sum(1)).unflatten(-1, (self.heads, -1)).unsqueeze(1)
