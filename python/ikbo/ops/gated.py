"""Gated linear units, the MLP made of one, and a Linear with its activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


def _features(x: Tensor, w: Tensor) -> Tensor:
    """An empty result of a Linear with weight w."""
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _bias_of(w: Tensor, mask: int, bit: int) -> Tensor:
    """Fake of a bias's gradient beside its weight [N, K] (which may have K = 0)."""
    return w.new_empty(w.shape[0] if mask >> bit & 1 else 0)


def _gated_linear_fake(  # type: ignore[no-untyped-def]
    x, w_gate, w_up, b_gate=None, b_up=None, activation="silu"
):
    return _features(x, w_gate)


def _gated_linear_fwd_fake(  # type: ignore[no-untyped-def]
    x, w_gate, w_up, b_gate=None, b_up=None, activation="silu"
):
    return tuple(_features(x, w_gate) for _ in range(3))


def _gated_grads(x: Tensor, w_gate: Tensor, w_up: Tensor, mask: int) -> tuple[Tensor, ...]:
    """Fakes of the gradients that both gated ops have."""
    inputs = tuple(empty_unless(mask, i, t) for i, t in enumerate((x, w_gate, w_up)))
    return (*inputs, _bias_of(w_gate, mask, 3), _bias_of(w_up, mask, 4))


def _gated_linear_bwd_fake(  # type: ignore[no-untyped-def]
    grad_out, x, w_gate, w_up, gate, up, activation, mask
):
    return _gated_grads(x, w_gate, w_up, mask)


def _gated_linear_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w_gate, w_up, _, _, ctx.activation = inputs
    ctx.save_for_backward(x, w_gate, w_up, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gated_linear_backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    mask = grad_mask(ctx, 0, 1, 2, 3, 4)
    grads = op("gated_linear_bwd")(grad_out, *ctx.saved_tensors, ctx.activation, mask)
    return (*(wanted(mask, i, g) for i, g in enumerate(grads)), None)


register(
    "gated_linear",
    fake=_gated_linear_fake,
    fwd_fake=_gated_linear_fwd_fake,
    bwd_fake=_gated_linear_bwd_fake,
    setup_context=_gated_linear_setup,
    backward=_gated_linear_backward,
)
register_fake("gated_linear.out", lambda *args, **kwargs: None)


def _gated_mlp_fake(  # type: ignore[no-untyped-def]
    x, w_gate, w_up, b_gate, b_up, w_down, b_down=None, activation="silu"
):
    return _features(x, w_down)


def _gated_mlp_fwd_fake(  # type: ignore[no-untyped-def]
    x, w_gate, w_up, b_gate, b_up, w_down, b_down=None, activation="silu"
):
    return _features(x, w_down), _features(x, w_gate), _features(x, w_up)


def _gated_mlp_bwd_fake(  # type: ignore[no-untyped-def]
    grad_out, x, w_gate, w_up, w_down, gate, up, activation, mask
):
    gated = _gated_grads(x, w_gate, w_up, mask)
    return (*gated, empty_unless(mask, 5, w_down), _bias_of(w_down, mask, 6))


def _gated_mlp_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w_gate, w_up, _, _, w_down, _, ctx.activation = inputs
    ctx.save_for_backward(x, w_gate, w_up, w_down, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gated_mlp_backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    mask = grad_mask(ctx, 0, 1, 2, 3, 4, 5, 6)
    grads = op("gated_mlp_bwd")(grad_out, *ctx.saved_tensors, ctx.activation, mask)
    return (*(wanted(mask, i, g) for i, g in enumerate(grads)), None)


register(
    "gated_mlp",
    fake=_gated_mlp_fake,
    fwd_fake=_gated_mlp_fwd_fake,
    bwd_fake=_gated_mlp_bwd_fake,
    setup_context=_gated_mlp_setup,
    backward=_gated_mlp_backward,
)
register_fake("gated_mlp.out", lambda *args, **kwargs: None)


def _linear_act_fake(x, w, b=None, activation="none"):  # type: ignore[no-untyped-def]
    return _features(x, w)


def _linear_act_fwd_fake(x, w, b=None, activation="none"):  # type: ignore[no-untyped-def]
    out = _features(x, w)
    saves = activation in NEEDS_PREACTIVATION
    return out, torch.empty_like(out) if saves else out.new_empty(0)


def _linear_act_bwd_fake(  # type: ignore[no-untyped-def]
    grad_out, x, w, saved, activation, mask
):
    return empty_unless(mask, 0, x), empty_unless(mask, 1, w), _bias_of(w, mask, 2)


def _linear_act_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, _, ctx.activation = inputs
    ctx.save_for_backward(x, w, saved_for(ctx.activation, *output))
    ctx.mark_non_differentiable(output[1])


def _linear_act_backward(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    mask = grad_mask(ctx, 0, 1, 2)
    grads = op("linear_act_bwd")(grad_out, *ctx.saved_tensors, ctx.activation, mask)
    return (*(wanted(mask, i, g) for i, g in enumerate(grads)), None)


register(
    "linear_act",
    fake=_linear_act_fake,
    fwd_fake=_linear_act_fwd_fake,
    bwd_fake=_linear_act_bwd_fake,
    setup_context=_linear_act_setup,
    backward=_linear_act_backward,
)


def gated_linear(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    activation: str = "silu",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Gated linear unit: two Linears of the same input, one activated, multiplied.

    ``out = act(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up)``: SwiGLU with ``silu``, GeGLU with
    ``gelu`` or ``gelu_tanh``, ReGLU with ``relu``, GLU with ``sigmoid``, bilinear with ``none``.

    Args:
        x: ``[..., K]``, any leading dimensions, none included.
        w_gate, w_up: ``[N, K]``, as nn.Linear stores them and in any strides; the halves of a
            stacked ``[2 N, K]`` weight are passed as views, without a copy.
        b_gate, b_up: ``[N]`` or None, each on its own.
        activation: none, relu, relu2, silu, gelu, gelu_tanh or sigmoid, of the gate.
        out: preallocated ``[..., N]``; inference only.

    Returns:
        ``[..., N]`` in the inputs' dtype. Sums are kept in float32 (float64 for float64); gate,
        activation and product are rounded once, together.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    args = (x, w_gate, w_up, b_gate, b_up, activation)
    if out is not None:
        op("gated_linear.out")(*args, out=out)
        return out
    result: Tensor = op("gated_linear")(*args)
    return result


def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None = None,
    activation: str = "silu",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The MLP of a gated linear unit: :func:`gated_linear`, then a Linear.

    ``out = gated_linear(x, w_gate, w_up, b_gate, b_up, activation) @ w_down.T + b_down``. Training
    saves the two pre-activations; the backward computes the hidden tensor again.

    Args:
        x: ``[..., K]``, any leading dimensions, none included.
        w_gate, w_up: ``[N, K]`` in any strides.
        b_gate, b_up: ``[N]`` or None, each on its own.
        w_down: ``[Nout, N]`` in any strides.
        b_down: ``[Nout]`` or None.
        activation: none, relu, relu2, silu, gelu, gelu_tanh or sigmoid, of the gate.
        out: preallocated ``[..., Nout]``; inference only.

    Returns:
        ``[..., Nout]`` in the inputs' dtype. Sums are kept in float32 (float64 for float64); the
        hidden tensor is rounded once and the result once.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    args = (x, w_gate, w_up, b_gate, b_up, w_down, b_down, activation)
    if out is not None:
        op("gated_mlp.out")(*args, out=out)
        return out
    result: Tensor = op("gated_mlp")(*args)
    return result


def linear_act(x: Tensor, w: Tensor, b: Tensor | None = None, activation: str = "none") -> Tensor:
    """A Linear and its activation: ``act(x @ w.T + b)``.

    Args:
        x: ``[..., K]``, any leading dimensions, none included.
        w: ``[N, K]``, as nn.Linear stores it and in any strides.
        b: ``[N]`` or None.
        activation: none, relu, relu2, silu, gelu, gelu_tanh or sigmoid.

    Returns:
        ``[..., N]`` in the inputs' dtype. Sums are kept in float32 (float64 for float64) and
        rounded once, after the activation.

    Raises:
        RuntimeError: shapes, dtypes or devices don't agree; names both sides.
    """
    result: Tensor = op("linear_act")(x, w, b, activation)
    return result
