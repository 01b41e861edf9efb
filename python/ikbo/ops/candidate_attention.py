"""Attention of candidates over their user's history, which is read where it lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._registration import empty_unless, grad_mask, op, register, register_fake, wanted
from .candidate_map import CandidateMap, map_arguments


def _fake(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[-1]))


def _fwd_fake(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    sums = torch.float64 if q.dtype is torch.float64 else torch.float32
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=sums)
    return _fake(q, *args, **kwargs), lse


def _bwd_fake(  # type: ignore[no-untyped-def]
    grad_out, q, k, v, out, lse, kv_start, kv_len, cand_to_user, user_offsets, order, scale, mask
):
    return tuple(empty_unless(mask, i, t) for i, t in enumerate((q, k, v)))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *rest, scale = inputs
    ctx.save_for_backward(q, k, v, *output, *rest)
    ctx.scale = scale
    ctx.set_materialize_grads(False)  # an unused lse then has the gradient None, not zeros


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    if grad_lse is not None:
        raise RuntimeError(
            "ikbo.candidate_attention_fwd: lse is not differentiable, and a gradient for it was "
            "asked for. Use lse.detach() where it enters the loss."
        )
    no_grads = (None,) * 6
    if grad_out is None:
        return (None, None, None, *no_grads)
    mask = grad_mask(ctx, 0, 1, 2)
    grads = op("candidate_attention_bwd")(grad_out, *ctx.saved_tensors, ctx.scale, mask)
    return (*(wanted(mask, i, g) for i, g in enumerate(grads)), *no_grads)


register(
    "candidate_attention", fake=_fake, fwd_fake=_fwd_fake, bwd_fake=_bwd_fake,
    setup_context=_setup_context, backward=_backward,
)  # fmt: skip
register_fake("candidate_attention.out", lambda *args, **kwargs: None)


def candidate_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cand_to_user: CandidateMap | Tensor,
    *,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each candidate's queries over its user's history, never copied per candidate.

    For each query head, with ``u = cand_to_user[b]``::

        out[b] = softmax(scale * q[b] @ k[u].T) @ v[u]

    Every query row attends to all of its user's keys: there is no mask between rows. Query head h
    reads kv head ``h // (H // Hk)`` (grouped-query attention; one head each where ``Hk == H``).

    The history comes in one of three forms:

    - dense: ``k [U, L, Hk, D]``, ``v [U, L, Hk, Dv]``. With ``kv_len``, only the first
      ``kv_len[u]`` keys of user u exist; what the rest holds, NaN included, changes nothing.
    - flat: ``k [T, Hk, D]``, ``v [T, Hk, Dv]``, user u having the keys from ``kv_start[u]`` on,
      ``kv_len[u]`` of them: jagged, left-padded, or slots of a slab, which users may share. Without
      ``kv_len``, ``kv_start [U + 1]`` holds offsets: user u has the keys from ``kv_start[u]`` up to
      ``kv_start[u + 1]``.
    - jagged ``torch.nested`` tensors (``layout=torch.jagged``), ``k [U, j, Hk, D]`` and
      ``v [U, j, Hk, Dv]`` with the same offsets.

    Differentiable in q, k and v, once. Gradients of k and v sum over all candidates of the user. On
    a Hopper GPU, in float16 and bfloat16, they are computed by PyTorch's flash attention where keys
    are dense, nested or given by offsets; elsewhere by the reference, slowly. Flash attention gives
    the same bits again only under ``torch.use_deterministic_algorithms(True)``.

    Args:
        q: ``[B, S, H, D]``, S query rows per candidate.
        k: the users' keys in the dtype of q; see above.
        v: the users' values in the dtype of q.
        cand_to_user: a :class:`CandidateMap`, or int32/int64 ``[B]``.
        kv_start: int32 or int64 ``[U]``, or offsets ``[U + 1]`` that don't decrease. Flat k and v
            need it; no other form has it.
        kv_len: int32 or int64 ``[U]``. Flat k and v need it beside a ``kv_start [U]``, dense ones
            may have it.
        scale: what scores are multiplied with; ``1 / sqrt(D)`` by default.
        out: preallocated ``[B, S, H, Dv]``; inference only.

    Returns:
        ``[B, S, H, Dv]`` in the dtype of q. Scores, softmax and sums are kept in float32 (float64
        for float64). Rows of a user with no keys are zero, as is a padding row. An out-of-range row
        is NaN, and so are the rows of a user whose ``kv_start`` or ``kv_len`` leaves the tensor.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
        ValueError: nested k and v with different offsets, or with kv_start or kv_len beside them.
    """
    if k.is_nested or v.is_nested:
        k, v, kv_start, kv_len = _from_nested(k, v, kv_start, kv_len)
    args = (q, k, v, kv_start, kv_len, *map_arguments(cand_to_user), scale)
    if out is None:
        result: Tensor = op("candidate_attention")(*args)
        return result
    op("candidate_attention.out")(*args, out=out)
    return out


def _from_nested(
    k: Tensor, v: Tensor, kv_start: Tensor | None, kv_len: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Flat k, v, kv_start and kv_len of jagged nested tensors, which share storage with them."""
    if kv_start is not None or kv_len is not None:
        raise ValueError(
            "ikbo.candidate_attention: expected neither kv_start nor kv_len with nested k and v, "
            "which have their own lengths."
        )
    for name, t in (("k", k), ("v", v)):
        if not (t.is_nested and t.layout is torch.jagged and t.dim() == 4):
            shape = f"{t.dim()}-D {'nested ' if t.is_nested else ''}tensor ({t.layout})"
            raise ValueError(
                f"ikbo.candidate_attention: expected {name} as a jagged nested tensor "
                f"[U, j, Hk, D] like the other, got a {shape}. Build both with "
                "torch.nested.nested_tensor_from_jagged(values, offsets)."
            )
    # The ragged size stands for the offsets: it is equal where the offsets are the same tensor.
    if k.shape[1] != v.shape[1]:
        raise ValueError(
            "ikbo.candidate_attention: expected nested k and v with the same offsets, got two of "
            "them. Build both with torch.nested.nested_tensor_from_jagged(values, offsets)."
        )
    nested: Any = k
    offsets, lengths = nested.offsets(), nested.lengths()
    start = offsets if lengths is None else offsets[:-1]
    return k.values(), v.values(), start, lengths
