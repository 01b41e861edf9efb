"""candidate_attention against scaled_dot_product_attention: on a view that groups each user's
candidates into one long query, and on keys and values gathered per candidate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..cases import Case, Draw, Maker, map_args

HEADS, HEAD_DIM = 2, 128
# Each has a row, since which is quickest shows only in graphs: the strongest counts.
BACKENDS = {
    "sdpa_grouped": None,  # torch's choice
    "sdpa_grouped_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_grouped_cudnn": SDPBackend.CUDNN_ATTENTION,
}


def cases(scaled: Callable[[int], int]) -> list[Case]:
    def case(
        name: str, L: int, S: int = 64, ratio: int = 64, batch: int = 2048, D: int = HEAD_DIM,
        shuffled: bool = False, jagged: bool = False,
    ) -> Case:  # fmt: skip
        def inputs(draw: Draw) -> SimpleNamespace:
            per_user, length, dim = scaled(ratio), scaled(L), scaled(D)
            users = draw.user_map(batch // ratio * per_user, per_user, shuffled)
            i = SimpleNamespace(map=users, kv_start=None, kv_len=None, length=length)
            i.q = draw.randn(users.n_candidates, scaled(S), HEADS, dim)
            keys: tuple[int, ...] = (users.n_users, length)
            if jagged:
                lengths = draw.integers(max(1, length // 8), length + 1, users.n_users)
                starts = lengths.cumsum(0, dtype=torch.int32) - lengths
                i.kv_start, i.kv_len = starts.to(draw.device), lengths.to(draw.device)
                keys = (int(lengths.sum()),)
            i.k, i.v = draw.randn(*keys, HEADS, dim), draw.randn(*keys, HEADS, dim)
            return i

        contestants: dict[str, Maker] = {"ikbo": _ikbo}
        if not shuffled and not jagged:
            contestants |= {impl: partial(_sdpa_grouped, b) for impl, b in BACKENDS.items()}
        contestants["gather_sdpa"] = _gather_sdpa_jagged if jagged else _gather_sdpa
        return Case(name, inputs, contestants)

    return [
        *(case(f"L{L}_s64_r64", L) for L in (1024, 512, 2048, 4096, 8192, 16384)),
        case("L1024_s64_r4", 1024, ratio=4),
        case("L1024_s64_r10", 1024, ratio=10, batch=2040),
        case("L1000_s64_r64", 1000),
        *(case(f"L1024_s{S}_r64", 1024, S) for S in (1, 8, 16, 32)),
        case("one_B512_s1_L2048", 2048, S=1, ratio=512, batch=512),
        *(case(f"D{D}_L1024_s64_r64", 1024, D=D) for D in (64, 256)),
        case("jag_L1024_s64_r64", 1024, jagged=True),
        case("shuf_L1024_s64_r64", 1024, shuffled=True),
    ]


def _ikbo(i: Any) -> Callable[[], Tensor]:
    return lambda: torch.ops.ikbo.candidate_attention(
        i.q, i.k, i.v, i.kv_start, i.kv_len, *map_args(i.map)
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """On ``[batch, rows, H, D]``."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def _sdpa_grouped(backend: SDPBackend | None, i: Any) -> Callable[[], Tensor]:
    """By one of torch's backends, or by torch's choice where that one doesn't take the case."""
    q = i.q.view(i.map.n_users, -1, *i.q.shape[2:])

    def choice() -> Tensor:
        return _attend(q, i.k, i.v).reshape(i.q.shape)

    if backend is None:
        return choice

    def forced() -> Tensor:
        with sdpa_kernel(backend):
            return choice()

    try:
        forced()
    except RuntimeError:
        return choice
    return forced


def _gather_sdpa(i: Any) -> Callable[[], Tensor]:
    users = i.map.cand_to_user
    return lambda: _attend(i.q, i.k.index_select(0, users), i.v.index_select(0, users))


def _gather_sdpa_jagged(i: Any) -> Callable[[], Tensor]:
    """Keys and values padded to the longest history beforehand, the padding masked."""
    users = i.map.cand_to_user
    valid = torch.arange(i.length, device=i.q.device) < i.kv_len[:, None]
    k, v = (t.new_zeros(i.map.n_users, i.length, *t.shape[1:]) for t in (i.k, i.v))
    k[valid], v[valid] = i.k, i.v
    mask = valid[:, None, None, :]
    return lambda: _attend(
        i.q, k.index_select(0, users), v.index_select(0, users), mask.index_select(0, users)
    )
