"""What every norm shares: fakes, autograd, and the formula its second derivatives come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._registration import empty_unless, grad_mask, op, register, register_fake, wanted

Grads = tuple[Tensor | None, ...]


def normalized_dims(weight: Tensor | None, bias: Tensor | None, normalized_ndim: int) -> int:
    """How many trailing dimensions are normalised, as the C++ decides it."""
    given = weight if weight is not None else bias
    return normalized_ndim if given is None else given.dim()


def fake_statistics(x: Tensor, ndim: int, *others: Tensor) -> Tensor:
    """Fake of mean or rstd: float32, float64 where a tensor of the sum is."""
    wide = torch.float64 in (t.dtype for t in (x, *others))
    return x.new_empty(x.shape[: x.dim() - ndim], dtype=torch.float64 if wide else torch.float32)


def register_norm(name: str, *, centred: bool) -> None:
    """Registers NAME(x, weight, bias, eps, weight_offset, out_dtype, normalized_ndim)."""
    eps_default = 1e-5 if centred else 1e-6
    n_statistics = 2 if centred else 1

    def fake(  # type: ignore[no-untyped-def]
        x, weight=None, bias=None, eps=eps_default, weight_offset=0.0, out_dtype=None,
        normalized_ndim=1,
    ):  # fmt: skip
        return x.new_empty(x.shape, dtype=out_dtype or x.dtype)

    def fwd_fake(  # type: ignore[no-untyped-def]
        x, weight=None, bias=None, eps=eps_default, weight_offset=0.0, out_dtype=None,
        normalized_ndim=1,
    ):  # fmt: skip
        ndim = normalized_dims(weight, bias, normalized_ndim)
        statistics = (fake_statistics(x, ndim) for _ in range(n_statistics))
        return (x.new_empty(x.shape, dtype=out_dtype or x.dtype), *statistics)

    def bwd_fake(grad_y, x, weight, bias, *rest):  # type: ignore[no-untyped-def]
        mask = rest[-1]
        return (empty_unless(mask, 0, x), *_fake_parameter_grads(mask, 1, x, weight, bias))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, _, ctx.weight_offset, _, ctx.normalized_ndim = inputs
        ctx.save_for_backward(x, weight, bias, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    def backward(ctx: Any, grad_y: Tensor, *_: Tensor) -> Grads:
        mask = grad_mask(ctx, 0, 1, 2)
        scalars = (ctx.weight_offset, ctx.normalized_ndim, mask)
        grads = op(f"{name}_bwd")(grad_y, *ctx.saved_tensors, *scalars)
        return (*(wanted(mask, i, g) for i, g in enumerate(grads)), None, None, None, None)

    def setup_second(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad_y, x, weight, bias, *statistics, ctx.weight_offset, ndim, ctx.mask = inputs
        ctx.save_for_backward(grad_y, x, weight, bias, statistics[-1])
        ctx.ndim = normalized_dims(weight, bias, ndim)

    def second_backward(ctx: Any, *cotangents: Tensor) -> Grads:
        grad_y, x, weight, bias, rstd = ctx.saved_tensors

        def first(grad_y: Tensor, x: Tensor, weight: Tensor | None) -> Sequence[Tensor | None]:
            return norm_gradients(
                grad_y, x, weight, rstd, bias=bias, centred=centred,
                weight_offset=ctx.weight_offset, ndim=ctx.ndim,
            )  # fmt: skip

        grads = _differentiate(ctx, cotangents, ctx.mask, first, (grad_y, x, weight))
        return (*grads, *(None,) * (1 + n_statistics + 3))

    register(
        name, fake=fake, fwd_fake=fwd_fake, bwd_fake=bwd_fake, setup_context=setup_context,
        backward=backward, casts_under_autocast=False,
        double_backward=(setup_second, second_backward),
    )  # fmt: skip
    register_fake(f"{name}.out", lambda *args, **kwargs: None)


def register_add_norm(name: str, *, centred: bool) -> None:
    """Registers NAME(x, residual, weight, bias, eps, weight_offset, out_dtype, residual_dtype,
    normalized_ndim)."""
    eps_default = 1e-5 if centred else 1e-6
    n_statistics = 2 if centred else 1

    def fake(  # type: ignore[no-untyped-def]
        x, residual, weight=None, bias=None, eps=eps_default, weight_offset=0.0, out_dtype=None,
        residual_dtype=None, normalized_ndim=1,
    ):  # fmt: skip
        y = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
        return y, x.new_empty(x.shape, dtype=residual_dtype or residual.dtype)

    def fwd_fake(  # type: ignore[no-untyped-def]
        x, residual, weight=None, bias=None, eps=eps_default, weight_offset=0.0, out_dtype=None,
        residual_dtype=None, normalized_ndim=1,
    ):  # fmt: skip
        ndim = normalized_dims(weight, bias, normalized_ndim)
        y = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
        residual_out = x.new_empty(x.shape, dtype=residual_dtype or residual.dtype)
        statistics = (fake_statistics(x, ndim, residual) for _ in range(n_statistics))
        return (y, residual_out, *statistics)

    def bwd_fake(  # type: ignore[no-untyped-def]
        grad_y, grad_residual_out, residual_out, weight, bias, *rest
    ):
        x_dtype, residual_dtype, _, mask = rest[-4:]
        residual_mask = mask if residual_dtype != x_dtype else 0
        return (
            empty_unless(mask, 0, residual_out, x_dtype),
            empty_unless(residual_mask, 1, residual_out, residual_dtype),
            *_fake_parameter_grads(mask, 2, residual_out, weight, bias),
        )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, residual, weight, bias, _, ctx.weight_offset, _, _, ctx.normalized_ndim = inputs
        ctx.dtypes = (x.dtype, residual.dtype)
        ctx.save_for_backward(output[1], weight, bias, *output[2:])
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)  # so that a residual_out nobody used costs nothing

    def backward(
        ctx: Any, grad_y: Tensor | None, grad_residual_out: Tensor | None, *_: Tensor
    ) -> Grads:
        nothing = (None,) * 5
        if grad_y is None:
            sums = (None if grad_residual_out is None else grad_residual_out.to(dtype)
                    for dtype in ctx.dtypes)  # fmt: skip
            return (*sums, None, None, *nothing)
        asked = grad_mask(ctx, 0, 1, 2, 3)
        one_dtype = ctx.dtypes[0] == ctx.dtypes[1]
        mask = asked | (asked >> 1 & 1) if one_dtype else asked  # x's gradient is residual's too
        grad_x, grad_residual, *parameters = op(f"{name}_bwd")(
            grad_y, grad_residual_out, *ctx.saved_tensors, ctx.weight_offset, *ctx.dtypes,
            ctx.normalized_ndim, mask,
        )  # fmt: skip
        grads = (grad_x, grad_x if one_dtype else grad_residual, *parameters)
        return (*(wanted(asked, i, g) for i, g in enumerate(grads)), *nothing)

    def setup_second(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad_y, grad_residual_out, residual_out, weight, bias, *statistics_and_scalars = inputs
        *statistics, ctx.weight_offset, x_dtype, residual_dtype, ndim, mask = statistics_and_scalars
        ctx.mask = mask if residual_dtype != x_dtype else mask & ~2
        ctx.ndim = normalized_dims(weight, bias, ndim)
        ctx.dtypes = (x_dtype, residual_dtype)
        ctx.save_for_backward(grad_y, grad_residual_out, residual_out, weight, bias, statistics[-1])

    def second_backward(ctx: Any, *cotangents: Tensor) -> Grads:
        *tensors, bias, rstd = ctx.saved_tensors

        def first(
            grad_y: Tensor, grad_residual_out: Tensor | None, residual_out: Tensor,
            weight: Tensor | None,
        ) -> Sequence[Tensor | None]:  # fmt: skip
            grad_sum, *parameters = norm_gradients(
                grad_y, residual_out, weight, rstd, bias=bias, centred=centred,
                weight_offset=ctx.weight_offset, ndim=ctx.ndim,
            )  # fmt: skip
            if grad_residual_out is not None:
                grad_sum = grad_sum + grad_residual_out
            return (grad_sum, grad_sum, *parameters)

        grads = _differentiate(ctx, cotangents, ctx.mask, first, tensors)
        return (*grads, *(None,) * (1 + n_statistics + 5))

    register(
        name, fake=fake, fwd_fake=fwd_fake, bwd_fake=bwd_fake, setup_context=setup_context,
        backward=backward, casts_under_autocast=False, differentiable_results=2,
        double_backward=(setup_second, second_backward),
    )  # fmt: skip


def register_head_norm() -> None:
    """Registers head_norm(x, weight, eps, weight_offset)."""

    def fake(x, weight, eps=1e-6, weight_offset=0.0):  # type: ignore[no-untyped-def]
        return x.new_empty(x.shape)

    def fwd_fake(x, weight, eps=1e-6, weight_offset=0.0):  # type: ignore[no-untyped-def]
        return x.new_empty(x.shape), fake_statistics(x, 1)

    def bwd_fake(grad_y, x, weight, rstd, weight_offset, mask):  # type: ignore[no-untyped-def]
        return empty_unless(mask, 0, x), empty_unless(mask, 1, weight)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, ctx.weight_offset = inputs
        ctx.save_for_backward(x, weight, output[1])
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, grad_y: Tensor, _: Tensor) -> Grads:
        mask = grad_mask(ctx, 0, 1)
        grads = op("head_norm_bwd")(grad_y, *ctx.saved_tensors, ctx.weight_offset, mask)
        return (*(wanted(mask, i, g) for i, g in enumerate(grads)), None, None)

    def setup_second(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.weight_offset, ctx.mask = inputs
        ctx.save_for_backward(*tensors)

    def second_backward(ctx: Any, *cotangents: Tensor) -> Grads:
        *tensors, rstd = ctx.saved_tensors

        def first(grad_y: Tensor, x: Tensor, weight: Tensor) -> Sequence[Tensor | None]:
            grad_x, grad_weight, _ = norm_gradients(
                grad_y, x, weight, rstd, centred=False, weight_offset=ctx.weight_offset, ndim=1
            )
            return grad_x, grad_weight

        return (*_differentiate(ctx, cotangents, ctx.mask, first, tensors), None, None, None)

    register(
        "head_norm", fake=fake, fwd_fake=fwd_fake, bwd_fake=bwd_fake, setup_context=setup_context,
        backward=backward, casts_under_autocast=False,
        double_backward=(setup_second, second_backward),
    )  # fmt: skip


def norm_gradients(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    bias: Tensor | None = None,
    centred: bool,
    weight_offset: float,
    ndim: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What NAME_bwd computes, in differentiable PyTorch: gradients of x, weight and bias.

    The statistics are recomputed from x, so that derivatives flow through them; of ``rstd`` only
    eps is taken, which NAME_bwd isn't told. Not rounded; None for a weight or bias not there.
    """
    dims = tuple(range(-ndim, 0))
    x, grad_y = x.to(rstd.dtype), grad_y.to(rstd.dtype)
    centre = x - x.mean(dims, keepdim=True) if centred else x
    mean_square = centre.square().mean(dims, keepdim=True)
    eps = (rstd.reshape(mean_square.shape) ** -2 - mean_square).detach()
    scale = (mean_square + eps).rsqrt()
    x_hat = centre * scale
    grad = grad_y if weight is None else grad_y * (weight.to(rstd.dtype) + weight_offset)
    inner = grad - x_hat * (grad * x_hat).mean(dims, keepdim=True)
    if centred:
        inner = inner - grad.mean(dims, keepdim=True)
    return (
        inner * scale,
        None if weight is None else (grad_y * x_hat).sum_to_size(weight.shape),
        None if bias is None else grad_y.sum_to_size(bias.shape),
    )


def _differentiate(
    ctx: Any,
    cotangents: Sequence[Tensor],
    mask: int,
    formula: Callable[..., Sequence[Tensor | None]],
    tensors: Sequence[Tensor | None],
) -> Grads:
    """Gradients of the leading inputs of a _bwd op from those of its results.

    ``formula(*tensors)`` computes the results; those whose bit in ``mask`` is off don't count.
    Differentiable in turn, so that third derivatives are right as well.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: grad_y may itself have been computed from x, and that path is not the op's.
        leaves = [None if t is None else t.view_as(t) for t in tensors]
        results = formula(*leaves)
        pairs = [
            (result, cotangent.to(result.dtype))
            for i, (result, cotangent) in enumerate(zip(results, cotangents, strict=True))
            if mask >> i & 1 and result is not None and result.requires_grad
        ]
    needed = {i: t for i, t in enumerate(leaves) if t is not None and ctx.needs_input_grad[i]}
    if not pairs or not needed:
        return (None,) * len(tensors)
    outputs, weights = zip(*pairs, strict=True)
    grads = torch.autograd.grad(
        outputs, tuple(needed.values()), weights, create_graph=again, allow_unused=True
    )
    by_position = dict(zip(needed, grads, strict=True))
    return tuple(by_position.get(i) for i in range(len(tensors)))


def _fake_parameter_grads(
    mask: int, first_bit: int, x: Tensor, *parameters: Tensor | None
) -> list[Tensor]:
    return [
        x.new_empty(0) if t is None else empty_unless(mask, bit, t)
        for bit, t in enumerate(parameters, first_bit)
    ]
