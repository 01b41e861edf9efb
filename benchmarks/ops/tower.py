"""A ranking tower, concat_linear and two linear_act on top, against torch's linear layers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cases import Case, Draw, Maker, compiled, map_args

NOTE = (
    "Features of user and candidate through three Linears with biases and relu, to one score a "
    "candidate. Launches and their tails are most of the time: each of `ikbo`'s kernels starts "
    "while the one ahead ends."
)


def cases(scaled: Callable[[int], int]) -> list[Case]:
    def case(batch: int, ratio: int) -> Case:
        def inputs(draw: Draw) -> SimpleNamespace:
            users = draw.user_map(scaled(batch), scaled(ratio))
            ku, kc, n1, n2 = (scaled(size) for size in (1024, 512, 512, 256))
            return SimpleNamespace(
                x_cand=draw.randn(users.n_candidates, kc), x_user=draw.randn(users.n_users, ku),
                w_cand=draw.randn(n1, kc) / (ku + kc) ** 0.5,
                w_user=draw.randn(n1, ku) / (ku + kc) ** 0.5, b1=draw.randn(n1),
                w2=draw.randn(n2, n1) / n1**0.5, b2=draw.randn(n2),
                w3=draw.randn(1, n2) / n2**0.5, b3=draw.randn(1), map=users,
            )  # fmt: skip

        contestants = {
            "ikbo": _ikbo,
            "compile": _call(lambda *args: compiled(_decomposed)(*args)),
            "eager": _call(_decomposed),
            "compile_gather_cat": _call(lambda *args: compiled(_gather_cat)(*args)),
        }
        return Case(f"B{batch}_r{ratio}_K1024+512_512_256_1", inputs, contestants)

    return [
        case(2000, 2000), case(200, 200), case(500, 500), case(1000, 1000), case(4096, 4096),
        case(2048, 64),
    ]  # fmt: skip


def _ikbo(i: Any) -> Callable[[], Tensor]:
    def run() -> Tensor:
        hidden = torch.ops.ikbo.concat_linear(
            i.x_cand, i.x_user, i.w_cand, i.w_user, i.b1, *map_args(i.map), "relu"
        )
        hidden = torch.ops.ikbo.linear_act(hidden, i.w2, i.b2, "relu")
        out: Tensor = torch.ops.ikbo.linear_act(hidden, i.w3, i.b3, "none")
        return out

    return run


def _upper_layers(hidden: Tensor, w2: Tensor, b2: Tensor, w3: Tensor, b3: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(F.relu(hidden), w2, b2)), w3, b3)


def _decomposed(
    x_cand: Tensor, x_user: Tensor, w_cand: Tensor, w_user: Tensor, b1: Tensor, users: Tensor,
    *upper: Tensor,
) -> Tensor:  # fmt: skip
    of_user = F.linear(x_user, w_user, b1)
    return _upper_layers(F.linear(x_cand, w_cand) + of_user.index_select(0, users), *upper)


def _gather_cat(
    x_cand: Tensor, x_user: Tensor, w_cand: Tensor, w_user: Tensor, b1: Tensor, users: Tensor,
    *upper: Tensor,
) -> Tensor:  # fmt: skip
    stacked = torch.cat((x_user.index_select(0, users), x_cand), 1)
    return _upper_layers(F.linear(stacked, torch.cat((w_user, w_cand), 1), b1), *upper)


def _call(function: Callable[..., Tensor]) -> Maker:
    return lambda i: (
        lambda: function(
            i.x_cand, i.x_user, i.w_cand, i.w_user, i.b1, i.map.cand_to_user, i.w2, i.b2, i.w3, i.b3
        )
    )
