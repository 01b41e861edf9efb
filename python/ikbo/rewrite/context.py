"""What `rewrite` is told of a model's inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Inputs = tuple[Any, ...] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Context:
    """What many candidates share: a user, a session, a query, a vendor.

    Attributes:
        inputs: names of the model's inputs whose dimension 0 are the context's rows.
        map: name of the input that holds the context's row of each candidate, an integer vector; or
            a matrix with such a vector for each feature, as TorchRec's ``inverse_indices``. If the
            model has no such input, its context inputs are taken to be copied already, a row for
            each candidate; the rewritten program then takes the context's rows, and the map as a
            keyword. None where the model copies rows without a map.
        jagged: names of inputs that hold the context's rows of different lengths one after another,
            such as the ids of a feature with several values: their size is a batch of its own.
    """

    inputs: Sequence[str]
    map: str | None = None
    jagged: Sequence[str] = ()
