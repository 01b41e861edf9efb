"""The error bound of ikbo's tests: a multiple of what plain PyTorch loses in the same dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_matches_definition(
    actual: Tensor, exact: Tensor, plain: Tensor | None = None, *, multiple: float = 2.0
) -> None:
    """Raises AssertionError unless ``actual`` is as close to ``exact`` as plain PyTorch would be.

    NaN and infinities must stand in the same places. Elsewhere, with ``e`` the machine epsilon of
    ``actual``'s dtype::

        max |actual - exact| <= multiple * max |plain - exact| + e * rms(exact)

    The second term is the floor: one rounding of a typical value, for where plain is exact.

    Args:
        actual: the result under test.
        exact: the definition in float64.
        plain: the same by plain PyTorch in ``actual``'s dtype; without it, ``exact`` rounded to
            that dtype stands in, so that only ``multiple`` roundings are allowed.
        multiple: how much worse than plain is accepted.
    """
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)} != {tuple(exact.shape)}"
    want = exact.detach().double()
    got = actual.detach().to(want.device).double()
    for what, where in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = where(got) != where(want)
        assert not differs.any(), f"{what} wanted and got in different places: {_first(differs)}"
    finite = torch.isfinite(want)
    if not finite.any():
        return
    # Widened first: a plain result that overflowed its dtype says nothing about the bound.
    stand_in = (want.to(actual.dtype) if plain is None else plain.detach().to(want.device)).double()
    allowed_by_plain = (stand_in - want)[finite & torch.isfinite(stand_in)]
    plain_error = allowed_by_plain.abs().max() if allowed_by_plain.numel() else want.new_zeros(())
    floor = torch.finfo(actual.dtype).eps * want[finite].square().mean().sqrt()
    bound = multiple * plain_error + floor
    error = torch.where(finite, (got - want).abs(), 0.0)
    worst = int(error.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
    assert error.max() <= bound, (
        f"error {error.max():.3e} > bound {bound:.3e} = {multiple} x plain's {plain_error:.3e} + "
        f"floor {floor:.3e}; worst at {at}: got {got[at]:.6g}, want {want[at]:.6g}"
    )


def _first(mask: Tensor) -> str:
    places = mask.nonzero()
    return f"{places.shape[0]} places, first {tuple(int(i) for i in places[0])}"
