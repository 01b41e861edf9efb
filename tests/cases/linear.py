from __future__ import annotations

from typing import Any

import torch

from .case import Case, Maker


def linear_compression_args(
    device: str,
    dtype: torch.dtype,
    *,
    B: int = 7,
    U: int = 3,
    M: int = 5,
    N: int = 8,
    Ku: int = 6,
    Kc: int = 4,
    bias: bool = True,
    activation: str = "none",
    rows_without_user: bool = True,
) -> tuple[Any, ...]:
    t = Maker(device, dtype)
    scale = 1 / max(1, Ku + Kc) ** 0.5
    return (
        t(B, Kc, N), t(U, Ku, N), t(M, Kc, scale=scale), t(M, Ku, scale=scale),
        t(M) if bias else None, t.map(B, U, rows_without_user=rows_without_user), None, None,
        activation,
    )  # fmt: skip


def concat_linear_args(device: str, dtype: torch.dtype, **sizes: Any) -> tuple[Any, ...]:
    sizes["N"] = 1
    e_cand, e_user, *rest = linear_compression_args(device, dtype, **sizes)
    return (e_cand[..., 0].contiguous(), e_user[..., 0].contiguous(), *rest)


def _add_args(full: Any, op: str) -> Any:
    def make(device: str, dtype: torch.dtype) -> tuple[Any, ...]:
        x_cand, x_user, w_cand, w_user, *rest = full(device, dtype)
        part = w_user @ x_user if op == "linear_compression" else x_user @ w_user.T
        return (x_cand, w_cand, part, *rest)

    return make


CASES = [
    Case(op + suffix, label, _add_args(make, op) if suffix else make, has_out=not suffix)
    for op, args in (
        ("linear_compression", linear_compression_args),
        ("concat_linear", concat_linear_args),
    )
    for suffix in ("", "_add")
    for label, make in (
        ("silu", lambda d, t, args=args: args(d, t, activation="silu")),
        ("relu_no_bias", lambda d, t, args=args: args(d, t, activation="relu", bias=False)),
        ("no_rows", lambda d, t, args=args: args(d, t, B=0)),
    )
]
