"""Linear compression: W @ [user rows; candidate rows], the user's product once per user."""

from __future__ import annotations

from torch import Tensor

from ._registration import op
from ._user_join import call, register_user_join
from .candidate_map import CandidateMap, map_arguments


def _out(e_cand: Tensor, w_cand: Tensor) -> Tensor:
    return e_cand.new_empty((e_cand.shape[0], w_cand.shape[0], e_cand.shape[2]))


register_user_join("linear_compression", _out)


def linear_compression(
    e_cand: Tensor,
    e_user: Tensor,
    w_cand: Tensor,
    w_user: Tensor,
    bias: Tensor | None,
    cand_to_user: CandidateMap | Tensor,
    activation: str = "none",
    *,
    out: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """Compresses stacked user and candidate embeddings without copying the user's per candidate.

    ``out[b] = act(w_cand @ e_cand[b] + w_user @ e_user[u(b)] + bias[:, None])`` with
    ``u(b) = cand_to_user[b]``. Equal to ``act([w_user w_cand] @ cat(e_user[u(b)], e_cand[b]))``;
    the split is exact algebra (In-Kernel Broadcast Optimization, PyTorch blog, 2026).

    Args:
        e_cand: ``[B, Kc, N]``, the candidates' embeddings: Kc rows of width N.
        e_user: ``[U, Ku, N]``, the users' embeddings.
        w_cand: ``[M, Kc]``.
        w_user: ``[M, Ku]``.
        bias: ``[M]`` or None.
        cand_to_user: a :class:`CandidateMap`, or int32/int64 ``[B]``.
        activation: none, relu, relu2, silu, gelu, gelu_tanh or sigmoid.
        out: preallocated ``[B, M, N]``; inference only.
        recompute: training with relu2, silu, gelu or gelu_tanh keeps the pre-activation
            ``[B, M, N]`` for the backward; with this the backward makes it again, at the price of
            one more forward. The gradients are the same bits, also under torch.compile. As with
            torch.utils.checkpoint, an input changed in place in between isn't noticed.

    Returns:
        ``[B, M, N]`` in the inputs' dtype. Sums are kept in float32 (float64 for float64) and the
        result is rounded once; on Hopper kernels the users' product is rounded to the inputs' dtype
        before it joins. A padding row is zero, an out-of-range row NaN.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    args = (e_cand, e_user, w_cand, w_user, bias, *map_arguments(cand_to_user), activation)
    if out is None:
        return call("linear_compression", args, recompute)
    op("linear_compression.out")(*args, out=out)
    return out


def linear_compression_add(
    e_cand: Tensor,
    w_cand: Tensor,
    user_part: Tensor,
    bias: Tensor | None,
    cand_to_user: CandidateMap | Tensor,
    activation: str = "none",
    *,
    recompute: bool = False,
) -> Tensor:
    """:func:`linear_compression` with the users' product ``w_user @ e_user`` already at hand.

    ``out[b] = act(w_cand @ e_cand[b] + user_part[u(b)] + bias[:, None])``.

    Args:
        e_cand: ``[B, Kc, N]``.
        w_cand: ``[M, Kc]``.
        user_part: ``[U, M, N]`` in the dtype of e_cand or float32, which Hopper kernels round
            to it.
        bias: ``[M]`` or None.
        cand_to_user: a :class:`CandidateMap`, or int32/int64 ``[B]``.
        activation: none, relu, relu2, silu, gelu, gelu_tanh or sigmoid.
        recompute: as in :func:`linear_compression`.

    Returns:
        ``[B, M, N]`` in the dtype of e_cand.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    args = (e_cand, w_cand, user_part, bias, *map_arguments(cand_to_user), activation)
    return call("linear_compression_add", args, recompute)
