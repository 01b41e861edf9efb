"""What a benchmark case is, and how its inputs are drawn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ikbo

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32,
}  # fmt: skip

# Takes one set of inputs, prepares what isn't timed (padding, prebuilt operands), and returns the
# call that is.
Maker = Callable[[Any], Callable[[], Any]]


class Draw:
    """Draws one set of inputs on a device; the same seed gives the same set."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        # Generators of its own: the default one is unusable after a failed graph capture.
        self._generator = torch.Generator(device).manual_seed(seed)
        self._cpu_generator = torch.Generator().manual_seed(seed)

    def randn(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=self.dtype, device=self.device, generator=self._generator)

    def integers(self, low: int, high: int, count: int) -> Tensor:
        """int32 ``[count]`` in [low, high), on the CPU."""
        return torch.randint(low, high, (count,), dtype=torch.int32, generator=self._cpu_generator)

    def user_map(self, batch: int, ratio: int, shuffled: bool = False) -> ikbo.CandidateMap:
        """``ratio`` candidates a user, the last user's fewer; grouped unless ``shuffled``."""
        users = torch.arange(batch) // ratio
        if not shuffled:
            return ikbo.candidate_map(counts=users.bincount(), device=self.device)
        users = users[torch.randperm(batch, generator=self._cpu_generator)]
        return ikbo.candidate_map(users, n_users=-(-batch // ratio), device=self.device)


@dataclass(frozen=True)
class Case:
    """One problem and who competes on it.

    Attributes:
        name: as the results and the bars name it.
        inputs: draws one set of inputs, a namespace of tensors.
        contestants: a maker per implementation, ``ikbo`` first. Of several makers the quickest
            runs. A call returns what ``ikbo``'s does, or None where there is nothing to compare.
        dtypes: keys of ``DTYPES``.
        by_graphs: whether long work is timed as graph replays, too.
    """

    name: str
    inputs: Callable[[Draw], Any]
    contestants: Mapping[str, Maker | Sequence[Maker]]
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    by_graphs: bool = False


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` for the shapes it is called with."""
    return torch.compile(function, dynamic=False)


def reset_compiler() -> None:
    """Forgets every compiled function: past its recompile limit torch runs them eagerly."""
    compiled.cache_clear()
    torch._dynamo.reset()


def map_args(candidates: ikbo.CandidateMap) -> tuple[Tensor, Tensor, Tensor | None]:
    """A map as the ops of ``torch.ops.ikbo`` take it."""
    return candidates.cand_to_user, candidates.user_offsets, candidates.order
