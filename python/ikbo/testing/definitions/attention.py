"""Definition of attention over the user's history."""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import finish_rows, user_rows


def candidate_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    cand_to_user: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q[b] @ k[u(b)].T) @ v[u(b)] per head; the scores' logsumexp [B, H, S].

    Flat k and v are cut into dense ones first: user u's keys in front, the rest of its row empty.
    """
    if k.dim() == 3:
        assert kv_start is not None
        if kv_len is None:
            kv_start, kv_len = kv_start[:-1], kv_start.diff()
        n_users, n_keys = kv_start.shape[0], k.shape[0]
        valid = (kv_start >= 0) & (kv_len >= 0) & (kv_start <= n_keys - kv_len)
        place = torch.arange(n_keys, device=k.device)
        index = (kv_start[:, None] + place).clamp(0, max(n_keys - 1, 0))
        k, v = (t[index.flatten()].reshape(n_users, *t.shape) for t in (k, v))
    else:
        n_users, n_keys = k.shape[:2]
        kv_len = q.new_full((n_users,), n_keys, dtype=torch.int64) if kv_len is None else kv_len
        valid = (kv_len >= 0) & (kv_len <= n_keys)
    exists = torch.arange(n_keys, device=k.device) < kv_len[:, None]
    # What lies outside a history is not there: zeroed, so that a NaN in it has no gradient either.
    k, v = (torch.where(exists[..., None, None], t, 0) for t in (k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = (
        user_rows(t, cand_to_user).transpose(1, 2).repeat_interleave(group, 1) for t in (k, v)
    )
    here = user_rows(exists, cand_to_user)[:, None, None]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = q.transpose(1, 2) @ keys.transpose(2, 3) * scale
    scores = scores.masked_fill(~here, float("-inf"))
    some = here.any(-1, keepdim=True)  # with an empty history, weights are 0 and not softmax's NaN
    weights = torch.where(some, scores, 0).softmax(-1) * some
    out = (weights @ values).transpose(1, 2)
    lse = scores.logsumexp(-1)
    invalid = user_rows(~valid, cand_to_user)
    nan = float("nan")
    out = finish_rows(out.masked_fill(invalid[:, None, None, None], nan), cand_to_user, n_users)
    lse = finish_rows(lse.masked_fill(invalid[:, None, None], nan), cand_to_user, n_users)
    padding = (cand_to_user == -1)[:, None, None]
    return out, lse.masked_fill(padding, float("-inf"))
