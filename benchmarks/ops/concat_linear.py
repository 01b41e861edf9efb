"""concat_linear against torch's linear layers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cases import Case, Draw, Maker, compiled, map_args


def cases(scaled: Callable[[int], int]) -> list[Case]:
    def case(batch: int, ratio: int, Ku: int, Kc: int, N: int) -> Case:
        def inputs(draw: Draw) -> SimpleNamespace:
            users = draw.user_map(scaled(batch), scaled(ratio))
            n, ku, kc = scaled(N), scaled(Ku), scaled(Kc)
            return SimpleNamespace(
                x_cand=draw.randn(users.n_candidates, kc), x_user=draw.randn(users.n_users, ku),
                w_cand=draw.randn(n, kc), w_user=draw.randn(n, ku), map=users,
            )  # fmt: skip

        contestants = {
            "ikbo": _ikbo,
            "torch_decomposed": _call(_decomposed),
            "torch_decomposed_compiled": _call(lambda *args: compiled(_decomposed)(*args)),
            "torch_gather_cat_linear": _gather_cat_linear,
        }
        return Case(f"B{batch}_r{ratio}_K{Ku}+{Kc}_N{N}", inputs, contestants)

    return [
        case(2048, 70, 2048, 1024, 1024),
        case(8192, 500, 2048, 1024, 512),
        case(200, 200, 1024, 512, 512),
        case(500, 500, 1024, 512, 512),
        case(2000, 2000, 1024, 512, 512),
    ]


def _ikbo(i: Any) -> Callable[[], Tensor]:
    return lambda: torch.ops.ikbo.concat_linear(
        i.x_cand, i.x_user, i.w_cand, i.w_user, None, *map_args(i.map)
    )


def _decomposed(
    x_cand: Tensor, x_user: Tensor, w_cand: Tensor, w_user: Tensor, users: Tensor
) -> Tensor:
    return F.linear(x_cand, w_cand) + F.linear(x_user, w_user).index_select(0, users)


def _call(function: Callable[..., Tensor]) -> Maker:
    def make(i: Any) -> Callable[[], Tensor]:
        return lambda: function(i.x_cand, i.x_user, i.w_cand, i.w_user, i.map.cand_to_user)

    return make


def _gather_cat_linear(i: Any) -> Callable[[], Tensor]:
    w, users = torch.cat((i.w_user, i.w_cand), 1), i.map.cand_to_user
    return lambda: F.linear(torch.cat((i.x_user.index_select(0, users), i.x_cand), 1), w)
