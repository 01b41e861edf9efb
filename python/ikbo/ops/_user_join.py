"""What linear_compression and concat_linear share: fakes and autograd of act(c + part[user])."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ._registration import (
    NEEDS_PREACTIVATION,
    empty_unless,
    grad_mask,
    op,
    register,
    register_fake,
    saved_for,
    wanted,
)


def register_user_join(name: str, out_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Registers NAME and NAME_add. `out_of(candidates, w_cand)` makes an empty output."""
    _register_full(name, out_of)
    _register_add(f"{name}_add", out_of)


def call(name: str, args: tuple[Any, ...], recompute: bool) -> Tensor:
    """The op, whose activation comes last; with `recompute`, no pre-activation is kept."""
    keeps = torch.is_grad_enabled() and args[-1] in NEEDS_PREACTIVATION
    if recompute and keeps and not _exporting():
        return checkpoint(op(name), *args, use_reentrant=False, preserve_rng_state=False)
    return op(name)(*args)


def _exporting() -> bool:
    # Strict export refuses a checkpoint. Under torch 2.11's compile is_exporting() is true as well,
    # the flag behind it is not.
    return torch.compiler.is_exporting() and getattr(torch.compiler, "_is_exporting_flag", True)


def _fwd_results(out: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    saves = activation in NEEDS_PREACTIVATION
    return out, torch.empty_like(out) if saves else out.new_empty(0)


def _register_full(name: str, out_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    def fake(  # type: ignore[no-untyped-def]
        x_cand, x_user, w_cand, w_user, bias, cand_to_user, user_offsets=None, order=None,
        activation="none",
    ):  # fmt: skip
        return out_of(x_cand, w_cand)

    def fwd_fake(  # type: ignore[no-untyped-def]
        x_cand, x_user, w_cand, w_user, bias, cand_to_user, user_offsets=None, order=None,
        activation="none",
    ):  # fmt: skip
        return _fwd_results(out_of(x_cand, w_cand), activation)

    def bwd_fake(  # type: ignore[no-untyped-def]
        grad_out, x_cand, x_user, w_cand, w_user, saved, cand_to_user, user_offsets, order,
        activation, mask,
    ):  # fmt: skip
        inputs = (x_cand, x_user, w_cand, w_user, w_cand.new_empty(w_cand.shape[0]))
        return tuple(empty_unless(mask, i, t) for i, t in enumerate(inputs))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x_cand, x_user, w_cand, w_user, _, cand_to_user, user_offsets, order, activation = inputs
        saved = saved_for(activation, *output)
        ctx.save_for_backward(
            x_cand, x_user, w_cand, w_user, saved, cand_to_user, user_offsets, order
        )
        ctx.activation = activation
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        mask = grad_mask(ctx, 0, 1, 2, 3, 4)
        grads = op(f"{name}_bwd")(grad_out, *ctx.saved_tensors, ctx.activation, mask)
        return (*(wanted(mask, i, g) for i, g in enumerate(grads)), None, None, None, None)

    register(
        name, fake=fake, fwd_fake=fwd_fake, bwd_fake=bwd_fake, setup_context=setup_context,
        backward=backward,
    )  # fmt: skip
    register_fake(f"{name}.out", lambda *args, **kwargs: None)


def _register_add(name: str, out_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    def fake(  # type: ignore[no-untyped-def]
        x_cand, w_cand, user_part, bias, cand_to_user, user_offsets=None, order=None,
        activation="none",
    ):  # fmt: skip
        return out_of(x_cand, w_cand)

    def fwd_fake(  # type: ignore[no-untyped-def]
        x_cand, w_cand, user_part, bias, cand_to_user, user_offsets=None, order=None,
        activation="none",
    ):  # fmt: skip
        return _fwd_results(out_of(x_cand, w_cand), activation)

    def bwd_fake(  # type: ignore[no-untyped-def]
        grad_out, x_cand, w_cand, user_part, saved, cand_to_user, user_offsets, order, activation,
        mask,
    ):  # fmt: skip
        inputs = (x_cand, w_cand, user_part, w_cand.new_empty(w_cand.shape[0]))
        return tuple(empty_unless(mask, i, t) for i, t in enumerate(inputs))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x_cand, w_cand, user_part, _, cand_to_user, user_offsets, order, activation = inputs
        saved = saved_for(activation, *output)
        ctx.save_for_backward(x_cand, w_cand, user_part, saved, cand_to_user, user_offsets, order)
        ctx.activation = activation
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        mask = grad_mask(ctx, 0, 1, 2, 3)
        grads = op(f"{name}_bwd")(grad_out, *ctx.saved_tensors, ctx.activation, mask)
        return (*(wanted(mask, i, g) for i, g in enumerate(grads)), None, None, None, None)

    register(
        name, fake=fake, fwd_fake=fwd_fake, bwd_fake=bwd_fake, setup_context=setup_context,
        backward=backward, keep_float32=(2,),
    )  # fmt: skip
