from __future__ import annotations

from typing import Any

import torch

from .case import Case, Maker

# Every tensor has unit variance in, and about unit variance out, so that no part can hide in noise.


def gated_mlp_args(
    device: str,
    dtype: torch.dtype,
    *,
    lead: tuple[int, ...] = (7,),
    K: int = 12,
    N: int = 10,
    Nout: int = 6,
    b_gate: bool = True,
    b_up: bool = True,
    b_down: bool = True,
    activation: str = "silu",
) -> tuple[Any, ...]:
    t = Maker(device, dtype)
    into, back = 1 / max(1, K) ** 0.5, 1 / max(1, N) ** 0.5
    return (
        t(*lead, K), t(N, K, scale=into), t(N, K, scale=into), t(N) if b_gate else None,
        t(N) if b_up else None, t(Nout, N, scale=back), t(Nout) if b_down else None, activation,
    )  # fmt: skip


def gated_linear_args(device: str, dtype: torch.dtype, **sizes: Any) -> tuple[Any, ...]:
    *args, _, _, activation = gated_mlp_args(device, dtype, **sizes)
    return (*args, activation)


def linear_act_args(device: str, dtype: torch.dtype, **sizes: Any) -> tuple[Any, ...]:
    x, w, _, b, _, activation = gated_linear_args(device, dtype, **sizes)
    return (x, w, b, activation)


CASES = [
    Case(op, label, make, has_out=op != "linear_act")
    for op, args in (
        ("gated_linear", gated_linear_args),
        ("gated_mlp", gated_mlp_args),
        ("linear_act", linear_act_args),
    )
    for label, make in (
        ("silu", lambda d, t, args=args: args(d, t, lead=(2, 3))),
        ("relu_one_bias", lambda d, t, args=args: args(d, t, activation="relu", b_gate=False)),
        ("no_rows", lambda d, t, args=args: args(d, t, lead=(0,), activation="gelu")),
    )
]
