from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .case import Case, Maker

FORMS = ("dense", "dense_len", "jagged", "offsets", "left_padded", "slab")


def candidate_attention_args(
    device: str,
    dtype: torch.dtype,
    *,
    form: str = "dense",
    B: int = 7,
    S: int = 2,
    U: int = 3,
    L: int = 5,
    H: int = 4,
    Hk: int = 2,
    D: int = 8,
    Dv: int = 6,
    scale: float | None = None,
    rows_without_user: bool = True,
) -> tuple[Any, ...]:
    """Histories of up to L keys: their lengths come from the seed, the first user's is L, and where
    there are three users the second's is empty."""
    t = Maker(device, dtype)
    q, k, v = t(B, S, H, D), t(U, L, Hk, D), t(U, L, Hk, Dv)
    lengths = torch.randint(L + 1, (U,), generator=t.generator)
    lengths[:1] = L
    if U > 2:
        lengths[1] = 0
    k, v, start = _lay_out(form, k, v, lengths)
    has_len = form not in ("dense", "offsets")
    kv_len = lengths.to(device, torch.int32) if has_len else None
    kv_start = None if start is None else start.to(device, torch.int32)
    users = t.map(B, U, rows_without_user=rows_without_user)
    return q, k, v, kv_start, kv_len, users, None, None, scale


def _lay_out(
    form: str, k: Tensor, v: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """k, v and kv_start in one of FORMS, the first lengths[u] keys of user u being its history."""
    if form in ("dense", "dense_len"):
        return k, v, None
    U, L = k.shape[:2]
    each = list(enumerate(lengths.tolist()))

    def flat(pieces: Callable[[Tensor], list[Tensor]]) -> tuple[Tensor, Tensor]:
        k_flat, v_flat = (torch.cat([x.new_zeros(0, *x.shape[2:]), *pieces(x)]) for x in (k, v))
        return k_flat, v_flat

    if form == "jagged":
        return *flat(lambda x: [x[u, :n] for u, n in each]), lengths.cumsum(0) - lengths
    if form == "offsets":  # a gap before the first user's keys and one after the last's
        pieces = flat(lambda x: [x.new_ones(2, *x.shape[2:]), *(x[u, :n] for u, n in each)])
        k, v = (torch.cat([x, x.new_ones(3, *x.shape[1:])]) for x in pieces)
        return k, v, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]) + 2
    if form == "left_padded":
        start = (torch.arange(U) + 1) * L - lengths
        return *flat(lambda x: [x[u].roll(-n, 0) for u, n in each]), start
    assert form == "slab"  # slots of L keys: one that is free, then the users' in reverse order
    start = (torch.arange(U).flip(0) + 1) * L
    return *flat(lambda x: [x.new_ones(L, *x.shape[2:]), *x.flip(0)]), start


CASES = [
    Case(
        "candidate_attention",
        label,
        lambda d, t, sizes=sizes: candidate_attention_args(d, t, **sizes),  # type: ignore[misc]
        has_out=True,
        all_results_differentiable=False,
    )
    for label, sizes in (
        ("dense", {}),
        ("dense_len", {"form": "dense_len", "scale": 0.5}),
        ("jagged", {"form": "jagged"}),
        ("offsets", {"form": "offsets"}),
        ("no_rows", {"B": 0}),
    )
]
