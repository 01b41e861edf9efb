"""Random small models that copy a user's rows, to test `ikbo.rewrite` with."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4
TOKENS = 3

Step = Callable[[Tensor, Tensor, Any], Tensor]  # the last is the model

# Each takes two values [rows, TOKENS, WIDTH] of the same batch and returns such a value.
STEPS: dict[str, Step] = {
    "linear": lambda x, y, m: m.linear(x),
    "linear_over_tokens": lambda x, y, m: m.over_tokens(x.transpose(1, 2)).transpose(1, 2),
    "layer_norm": lambda x, y, m: m.norm(x),
    "batch_norm": lambda x, y, m: m.batch_norm(x),
    "gelu": lambda x, y, m: torch.nn.functional.gelu(x),
    "relu": lambda x, y, m: x.relu(),
    "tanh": lambda x, y, m: x.tanh(),
    "add": lambda x, y, m: x + y,
    "multiply": lambda x, y, m: x * y.sigmoid(),
    "join_features": lambda x, y, m: m.joined(torch.cat([x, y], 2)),
    "join_features_flat": lambda x, y, m: m.flat(torch.cat([x, y], 2).flatten(1)).unflatten(
        1, (TOKENS, WIDTH)
    ),
    "join_pooled": lambda x, y, m: x + m.joined(torch.cat([x.mean(1), y.amax(1)], 1))[:, None],
    "join_tokens": lambda x, y, m: m.compress @ torch.cat([x, y], 1),
    "join_tokens_einsum": lambda x, y, m: torch.einsum(
        "mk,bkd->bmd", m.compress, torch.cat([y, x], 1)
    ),
    "join_tokens_linear": lambda x, y, m: m.stacked(torch.cat([x, y], 1).mT).mT,
    "attention": lambda x, y, m: torch.nn.functional.scaled_dot_product_attention(
        *(t.unflatten(2, (2, -1)).transpose(1, 2) for t in (x, y, y))
    ).transpose(1, 2).flatten(2),
    "attention_by_hand": lambda x, y, m: (x @ y.mT / 2).softmax(-1) @ y,
    "self_attention": lambda x, y, m: m.attention(x, x, x, need_weights=False)[0],
    "softmax_of_tokens": lambda x, y, m: x.softmax(1),
    "softmax_of_rows": lambda x, y, m: x.softmax(0),
    "running_sum_of_tokens": lambda x, y, m: x.cumsum(1) / TOKENS,
    "running_mean_of_rows": lambda x, y, m: x.cumsum(0) / max(x.shape[0], 1),
    "centred_rows": lambda x, y, m: x - x.mean(0),
    "flipped_tokens": lambda x, y, m: x.flip(1),
    "flipped_rows": lambda x, y, m: x.flip(0),
    "split_tokens": lambda x, y, m: torch.cat(
        [a + b for a, b in zip(x.chunk(TOKENS, 1), y.unbind(1), strict=True)
         for b in [b[:, None]]], 1
    ),
    "position": lambda x, y, m: x + m.position,
    "where": lambda x, y, m: torch.where(y > 0, x, 0.5 * y),
    "join_differences": lambda x, y, m: m.joined(torch.cat([x - y, y], 2)),
    "gated_join": lambda x, y, m: (torch.cat([x, y], 1) * torch.cat([y, x], 1).sigmoid())[:, 1:4],
    "normed_join": lambda x, y, m: m.norm(torch.cat([x, y], 1))[:, 2:5],
    "half_of_join": lambda x, y, m: torch.cat([x, y], 1).chunk(2, 1)[1] + x,
    "sum_of_join": lambda x, y, m: x + torch.cat([y, x], 1).sum(1, keepdim=True) / TOKENS,
    "mean_of_join": lambda x, y, m: x + torch.cat([y, x], 1).mean(1, keepdim=True),
    "products": lambda x, y, m: m.flat_products(
        _products(torch.cat([x, y], 1)).flatten(1)
    ).unflatten(1, (TOKENS, WIDTH)),
    "pairs": lambda x, y, m: m.pairs(_pairs(_products(torch.cat([x, y], 1)))).unflatten(
        1, (TOKENS, WIDTH)
    ),
    "compressed_fm": lambda x, y, m: _compressed_fm(torch.cat([x, y], 1), m)[:, :TOKENS],
    "bilinear": lambda x, y, m: x + m.bilinear(x.mean(1), y.mean(1))[:, None],
    "bilinear_einsum": lambda x, y, m: x * torch.einsum(
        "bti,ij,btj->bt", x, m.linear.weight, y
    ).sigmoid()[..., None],
    "crossed": lambda x, y, m: m.flat_crossed(
        torch.cat([x.flatten(1), y.flatten(1)], 1) * m.wide(m.thin(y.mean(1)))
        - torch.cat([y.flatten(1), x.flatten(1)], 1)
    ).unflatten(1, (TOKENS, WIDTH)),
    "modulated": lambda x, y, m: x + m.linear(
        x[:, 0] * m.modulation(y.mean(1)[:, :2]) + x[:, 1]
    )[:, None],
    "target_repeated": lambda x, y, m: m.joined(
        torch.cat([x, y[:, :1].expand(-1, TOKENS, -1)], 2)
    ),
}  # fmt: skip


def _products(rows: Tensor) -> Tensor:
    return rows @ rows.mT / WIDTH


def _pairs(products: Tensor) -> Tensor:
    n = products.shape[1]
    i, j = torch.tril_indices(n, n, -1)
    return products[:, i, j]


def _compressed_fm(rows: Tensor, m: Any) -> Tensor:
    return rows @ (rows.mT @ m.compress.T) @ m.position / WIDTH


class RandomModel(nn.Module):
    """A model of random steps on users' and candidates' rows; equal seeds give equal models.

    ``forward(user [U, 3, 4], candidate [B, 3, 4], user_index [B])``. Users' rows are copied at a
    random point, by ``x[idx]`` or ``index_select``, once or twice.
    """

    def __init__(self, seed: int, most_steps: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.over_tokens, self.batch_norm = nn.Linear(TOKENS, TOKENS), nn.BatchNorm1d(TOKENS)
        self.joined, self.stacked = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * TOKENS, TOKENS)
        self.flat = nn.Linear(2 * WIDTH * TOKENS, WIDTH * TOKENS)
        n = 2 * TOKENS
        self.flat_products = nn.Linear(n * n, WIDTH * TOKENS)
        self.pairs = nn.Linear(n * (n - 1) // 2, WIDTH * TOKENS)
        self.thin, self.wide = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 2 * WIDTH * TOKENS)
        self.flat_crossed, self.modulation = (
            nn.Linear(2 * WIDTH * TOKENS, WIDTH * TOKENS),
            nn.Linear(2, WIDTH),
        )
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.compress = nn.Parameter(torch.empty(TOKENS, 2 * TOKENS))
        self.position = nn.Parameter(torch.empty(TOKENS, WIDTH))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        choose = random.Random(seed)
        names = list(STEPS)
        self.on_users = [choose.choice(names) for _ in range(choose.randrange(2))]
        self.by_select = choose.random() < 0.5
        self.steps = [(choose.choice(names), choose.randrange(99), choose.randrange(99))
                      for _ in range(choose.randint(1, most_steps))]  # fmt: skip

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> Tensor:
        once = user
        for name in self.on_users:
            once = STEPS[name](once, user, self)
        copied = once.index_select(0, user_index) if self.by_select else once[user_index]
        values = [candidate, copied, user[user_index]]
        for name, a, b in self.steps:
            values.append(STEPS[name](values[a % len(values)], values[b % len(values)], self))
        return torch.cat([values[-1], values[-2]], 1)

    def extra_repr(self) -> str:
        return f"{self.on_users}, then {[name for name, *_ in self.steps]}"
