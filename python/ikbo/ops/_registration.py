"""How an op gets its fakes, autograd and autocast. One call of `register` per family member.

Three ops a function (see csrc/ops/registration.cpp): NAME is for inference, NAME_fwd returns what
training saves and carries autograd, NAME_bwd computes gradients. NAME under grad calls NAME_fwd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._library import library

library()  # the schemas must exist before anything is registered for them
_IMPL = torch.library.Library("ikbo", "IMPL")

Fake = Callable[..., Any]


def op(name: str) -> Any:
    """torch.ops.ikbo.NAME.default, or of an overload given as NAME.OVERLOAD."""
    name, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.ikbo, name), overload or "default")


def register_fake(name: str, fake: Fake) -> None:
    """Registers the fake (shape) implementation of an op or overload."""
    torch.library.register_fake(f"ikbo::{name}", fake)


def register(
    name: str,
    *,
    fake: Fake,
    fwd_fake: Fake,
    bwd_fake: Fake,
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    differentiable_results: int = 1,
    casts_under_autocast: bool = True,
    double_backward: tuple[Callable[..., None], Callable[..., Any]] | None = None,
    keep_float32: Sequence[int] = (),
) -> None:
    """Registers everything Python adds to NAME, NAME_fwd and NAME_bwd.

    Args:
        fake, fwd_fake, bwd_fake: shape functions of the three ops.
        setup_context, backward: autograd of NAME_fwd, for torch.library.register_autograd.
        differentiable_results: how many of NAME_fwd's results NAME returns.
        casts_under_autocast: whether floating arguments take autocast's dtype. Norms keep theirs.
        double_backward: autograd of NAME_bwd, where there is one; elsewhere it raises.
        keep_float32: positions of arguments that autocast leaves alone when they are float32.
    """
    register_fake(name, fake)
    register_fake(f"{name}_fwd", fwd_fake)
    register_fake(f"{name}_bwd", bwd_fake)
    torch.library.register_autograd(f"ikbo::{name}_fwd", backward, setup_context=setup_context)
    if double_backward is None:
        register_not_differentiable(f"{name}_bwd", f"ikbo.{name}: only first derivatives exist")
    else:
        setup, formula = double_backward
        torch.library.register_autograd(f"ikbo::{name}_bwd", formula, setup_context=setup)
    _IMPL.impl(name, _inference_under_autograd(name, differentiable_results), "Autograd")
    if casts_under_autocast:
        for variant in (name, f"{name}_fwd"):
            register_autocast(variant, keep_float32)


def register_not_differentiable(name: str, message: str) -> None:
    """Makes differentiating an op raise, instead of torch's silent or warning default."""

    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(f"{message}, and a derivative of {name} was asked for.")

    torch.library.register_autograd(f"ikbo::{name}", backward)


def _inference_under_autograd(name: str, results: int) -> Callable[..., Any]:
    infer, fwd = op(name), op(f"{name}_fwd")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(arg, Tensor) and arg.requires_grad for arg in (*args, *kwargs.values())
        ):
            outputs = fwd(*args, **kwargs)
            return outputs[0] if results == 1 else outputs[:results]
        with torch._C._AutoDispatchBelowAutograd():
            return infer(*args, **kwargs)

    return kernel


def register_autocast(name: str, keep_float32: Sequence[int] = ()) -> None:
    """Under autocast, NAME's floating arguments take its dtype (fp64 stays, as in torch)."""
    target = op(name)
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def kernel(
            *args: Any, _device: str = device, _excluded: Any = excluded, **kwargs: Any
        ) -> Any:
            dtype = torch.get_autocast_dtype(_device)

            def cast(value: Any, keep: bool = False) -> Any:
                floating = isinstance(value, Tensor) and value.is_floating_point()
                if not floating or value.dtype is torch.float64:
                    return value
                if keep and value.dtype is torch.float32:
                    return value
                return value.to(dtype)

            with torch._C._ExcludeDispatchKeyGuard(_excluded):
                cast_args = [cast(value, i in keep_float32) for i, value in enumerate(args)]
                return target(*cast_args, **{k: cast(v) for k, v in kwargs.items()})

        _IMPL.impl(name, kernel, key)


def grad_mask(ctx: Any, *positions: int) -> int:
    """The grad_mask of a _bwd op: bit i is set where input `positions[i]` of NAME_fwd needs it."""
    needed = ctx.needs_input_grad  # torch leaves out trailing arguments equal to their defaults
    return sum(1 << bit for bit, i in enumerate(positions) if i < len(needed) and needed[i])


def wanted(mask: int, bit: int, grad: Tensor) -> Tensor | None:
    """A result of a _bwd op as autograd expects it: None where it was not asked for."""
    return grad if mask >> bit & 1 else None


def empty_unless(mask: int, bit: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Fake of a _bwd result: shaped like `like` where asked for, else of size 0."""
    size = like.shape if mask >> bit & 1 else (0,)
    return torch.empty(size, dtype=dtype or like.dtype, device=like.device)


# Whether training saves the pre-activation (act' needs it) or the output will do.
NEEDS_PREACTIVATION = frozenset({"relu2", "silu", "gelu", "gelu_tanh"})
ACTIVATIONS = ("none", "relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid")


def saved_for(activation: str, out: Tensor, preact: Tensor) -> Tensor:
    """What a linear op's backward reads: nothing, the pre-activation, or the output."""
    return out if activation in ("relu", "sigmoid") else preact
