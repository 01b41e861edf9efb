"""Definitions of the products with a shared user side."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}


def user_rows(user_side: Tensor, cand_to_user: Tensor) -> Tensor:
    """Each candidate's row of the user side: the broadcast that ikbo exists to avoid."""
    if user_side.shape[0] == 0:
        user_side = user_side.new_zeros((1, *user_side.shape[1:]))
    index = torch.where(_has_user(cand_to_user, user_side.shape[0]), cand_to_user, 0)
    return user_side.index_select(0, index)


def _has_user(cand_to_user: Tensor, n_users: int) -> Tensor:
    return (cand_to_user >= 0) & (cand_to_user < n_users)


def finish_rows(out: Tensor, cand_to_user: Tensor, n_users: int) -> Tensor:
    """Zero for padding rows, NaN for out-of-range rows; gradients flow through neither."""
    shape = (-1, *(1,) * (out.dim() - 1))
    fill = torch.where(cand_to_user == -1, 0.0, float("nan")).to(out.dtype).reshape(shape)
    return torch.where(_has_user(cand_to_user, n_users).reshape(shape), out, fill)


def linear_compression(
    e_cand: Tensor,
    e_user: Tensor,
    w_cand: Tensor,
    w_user: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
    activation: str = "none",
) -> Tensor:
    """act([w_user w_cand] @ cat(e_user[u(b)], e_cand[b]) + bias[:, None])."""
    stacked = torch.cat([user_rows(e_user, cand_to_user), e_cand], dim=1)
    out = torch.cat([w_user, w_cand], dim=1) @ stacked
    if bias is not None:
        out = out + bias[:, None]
    return finish_rows(ACTIVATIONS[activation](out), cand_to_user, e_user.shape[0])


def concat_linear(
    x_cand: Tensor,
    x_user: Tensor,
    w_cand: Tensor,
    w_user: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
    activation: str = "none",
) -> Tensor:
    """act(F.linear(cat(x_user[u(b)], x_cand[b]), cat(w_user, w_cand), bias))."""
    features = torch.cat([user_rows(x_user, cand_to_user), x_cand], dim=1)
    out = F.linear(features, torch.cat([w_user, w_cand], dim=1), bias)
    return finish_rows(ACTIVATIONS[activation](out), cand_to_user, x_user.shape[0])
