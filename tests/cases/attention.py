from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .case import Case, Maker

FORMS = ("dense", "dense_len", "jagged", "left_padded", "slab")


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
    kv_len = None if form == "dense" else lengths.to(device, torch.int32)
    kv_start = None if start is None else start.to(device, torch.int32)
    users = t.map(B, U, rows_without_user=rows_without_user)
    return q, k, v, kv_start, kv_len, users, None, None, scale


def _lay_out(
    form: str, k: Tensor, v: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """k, v and kv_start in one of FORMS; what is outside a history is left as it is."""
    U, L = k.shape[:2]
    if form in ("dense", "dense_len"):
        return k, v, None
    if form == "jagged":
        start = lengths.cumsum(0) - lengths
        k, v = (torch.cat([x[:0, 0], *(r[:n] for r, n in zip(x, lengths.tolist(), strict=True))])
                for x in (k, v))  # fmt: skip
        return k, v, start
    if form == "left_padded":
        k, v = (x.flatten(0, 1) for x in (k.clone(), v.clone()))
        return k, v, (torch.arange(U) + 1) * L - lengths
    assert form == "slab"  # the users' slots in reverse order, an unused one first
    k, v = (torch.cat([x.new_ones(1, *x.shape[1:]), x]).flatten(0, 1) for x in (k, v))
    return k, v, torch.arange(U).flip(0) * L + L


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
        ("no_rows", {"B": 0}),
    )
]
