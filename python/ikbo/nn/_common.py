"""What the modules share."""

from __future__ import annotations

from torch import nn

from ..ops._registration import ACTIVATIONS


def share_parameters(source: nn.Module, target: nn.Module) -> None:
    """Makes source's parameters those of target, which names them alike, and copies the mode."""
    for path, parameter in source.named_parameters(remove_duplicate=False):
        owner, _, name = path.rpartition(".")
        setattr(target.get_submodule(owner), name, parameter)
    target.train(source.training)


def check_activation(module: str, activation: str) -> str:
    """Returns the activation, or raises ValueError where there is none of that name."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"ikbo.nn.{module}: expected activation to be one of {', '.join(ACTIVATIONS)}, got "
            f"{activation!r}."
        )
    return activation
