"""The Linear after a concatenation of user and candidate features."""

from __future__ import annotations

from torch import Tensor

from ._registration import op
from ._user_join import call, register_user_join
from .candidate_map import CandidateMap, map_arguments


def _out(x_cand: Tensor, w_cand: Tensor) -> Tensor:
    return x_cand.new_empty((x_cand.shape[0], w_cand.shape[0]))


register_user_join("concat_linear", _out)


def concat_linear(
    x_cand: Tensor,
    x_user: Tensor,
    w_cand: Tensor,
    w_user: Tensor,
    bias: Tensor | None,
    cand_to_user: CandidateMap | Tensor,
    activation: str = "none",
    *,
    out: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """Applies a Linear to [user; candidate] features without copying the user's per candidate.

    ``out[b] = act(w_cand @ x_cand[b] + w_user @ x_user[u(b)] + bias)`` with
    ``u(b) = cand_to_user[b]``. Equal to ``act(F.linear(cat(x_user[u(b)], x_cand[b]),
    cat(w_user, w_cand, dim=1), bias))``; the split of the product is exact algebra.

    Args:
        x_cand: ``[B, Kc]``, the candidates' features.
        x_user: ``[U, Ku]``, the users' features.
        w_cand: ``[N, Kc]``.
        w_user: ``[N, Ku]``.
        bias: ``[N]`` or None.
        cand_to_user: a :class:`CandidateMap`, or int32/int64 ``[B]``.
        activation: none, relu, relu2, silu, gelu, gelu_tanh or sigmoid.
        out: preallocated ``[B, N]``; inference only.
        recompute: training with relu2, silu, gelu or gelu_tanh keeps the pre-activation
            ``[B, N]`` for the backward; with this the backward makes it again, at the price of
            one more forward. The gradients are the same bits, also under torch.compile. As with
            torch.utils.checkpoint, an input changed in place in between isn't noticed.

    Returns:
        ``[B, N]`` in the inputs' dtype. Sums are kept in float32 (float64 for float64) and the
        result is rounded once; on Hopper kernels the users' product is rounded to the inputs' dtype
        before it joins. A padding row is zero, an out-of-range row NaN.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    args = (x_cand, x_user, w_cand, w_user, bias, *map_arguments(cand_to_user), activation)
    if out is None:
        return call("concat_linear", args, recompute)
    op("concat_linear.out")(*args, out=out)
    return out


def concat_linear_add(
    x_cand: Tensor,
    w_cand: Tensor,
    user_part: Tensor,
    bias: Tensor | None,
    cand_to_user: CandidateMap | Tensor,
    activation: str = "none",
    *,
    recompute: bool = False,
) -> Tensor:
    """:func:`concat_linear` with the users' product ``x_user @ w_user.T`` already at hand.

    ``out[b] = act(w_cand @ x_cand[b] + user_part[u(b)] + bias)``.

    Args:
        x_cand: ``[B, Kc]``.
        w_cand: ``[N, Kc]``.
        user_part: ``[U, N]`` in the dtype of x_cand or float32.
        bias: ``[N]`` or None.
        cand_to_user: a :class:`CandidateMap`, or int32/int64 ``[B]``.
        activation: none, relu, relu2, silu, gelu, gelu_tanh or sigmoid.
        recompute: as in :func:`concat_linear`.

    Returns:
        ``[B, N]`` in the dtype of x_cand.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    args = (x_cand, w_cand, user_part, bias, *map_arguments(cand_to_user), activation)
    return call("concat_linear_add", args, recompute)
