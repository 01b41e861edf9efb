"""Grouping candidates by user."""

from __future__ import annotations

import torch
from torch import Tensor

from ._registration import op, register_fake


def _fake(cand_to_user: Tensor, n_users: int) -> tuple[Tensor, Tensor]:
    torch._check(cand_to_user.dim() == 1)
    order = cand_to_user.new_empty(cand_to_user.shape, dtype=torch.int32)
    return order, cand_to_user.new_empty(n_users + 1, dtype=torch.int32)


register_fake("group_candidates", _fake)


def group_candidates(cand_to_user: Tensor, n_users: int) -> tuple[Tensor, Tensor]:
    """Groups the candidates of a batch by user: a stable sort of the map, on its device.

    ``order`` lists the candidates user by user, each user's in the order of the batch; user u's are
    ``order[user_offsets[u] : user_offsets[u + 1]]``. Rows without a user (-1 or out of range) come
    last; ``user_offsets[n_users]`` is the number of rows that have one. No host sync; capturable.

    Args:
        cand_to_user: int32 or int64 ``[B]``, the user of each candidate, B < 2^31.
        n_users: the number of users U.

    Returns:
        ``order`` int32 ``[B]`` and ``user_offsets`` int32 ``[U + 1]``.

    Raises:
        RuntimeError: the map is not 1-D or not an integer tensor, or ``n_users`` is negative.
    """
    order, user_offsets = op("group_candidates")(cand_to_user, n_users)
    return order, user_offsets
