"""The candidate -> user map of a batch, built once and shared by every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from .group_candidates import group_candidates

PADDING_ROW = -1

Integers = Tensor | Sequence[int]


@dataclasses.dataclass(frozen=True)
class CandidateMap:
    """Which user each candidate of a batch belongs to. Build it with :func:`candidate_map`.

    A pytree and known to ``torch.export``, so that it can be an argument of compiled and exported
    programs.

    Attributes:
        cand_to_user: int32 ``[B]``, the user of each candidate in any order. -1 marks a padding
            row: its output is zero. Other values outside ``[0, U)`` make that row NaN.
        user_offsets: int32 ``[U + 1]``: user u has candidates ``user_offsets[u]`` up to
            ``user_offsets[u + 1]`` of ``order``.
        order: int32 ``[B]``, the candidates user by user; None promises that the batch itself is
            grouped by user in ascending order, rows without a user last.
    """

    cand_to_user: Tensor
    user_offsets: Tensor
    order: Tensor | None = None

    @property
    def n_candidates(self) -> int:
        """B, the number of candidates."""
        return self.cand_to_user.shape[0]

    @property
    def n_users(self) -> int:
        """U, the number of users."""
        return self.user_offsets.shape[0] - 1

    def to(self, device: torch.device | str) -> CandidateMap:
        """The same map on another device."""
        order = None if self.order is None else self.order.to(device)
        return CandidateMap(self.cand_to_user.to(device), self.user_offsets.to(device), order)

    def check(self) -> CandidateMap:
        """Returns self if every entry is -1 or a user of the batch. Waits for a GPU.

        Raises:
            ValueError: an entry is out of range; names the first one.
        """
        _check_range(self.cand_to_user, self.n_users)
        return self


torch.export.register_dataclass(CandidateMap, serialized_type_name="ikbo.CandidateMap")
# A saved program holds its example inputs; without this torch.export.load refuses those with a map.
torch.serialization.add_safe_globals([CandidateMap])


def candidate_map(
    indices: Integers | None = None,
    *,
    n_users: int | None = None,
    counts: Integers | None = None,
    offsets: Integers | None = None,
    n_candidates: int | None = None,
    device: torch.device | str | None = None,
) -> CandidateMap:
    """Builds the map of a batch from one of three descriptions.

    Args:
        indices: the user of each candidate ``[B]``, any order, -1 for padding rows; needs n_users.
        n_users: U, with ``indices`` only.
        counts: candidates per user ``[U]``, for a batch grouped by user.
        offsets: ``[U + 1]``, ascending from 0, for a batch grouped by user.
        n_candidates: B, with ``counts`` or ``offsets`` only. Rows past the last user's are padding.
            Needed for data on a GPU, where finding it out would wait.
        device: where the map goes; by default where the data is (lists: the CPU).

    Returns:
        A :class:`CandidateMap`. Its range is checked at once when the data is on the CPU; for
        device data call :meth:`CandidateMap.check`, which waits.

    Raises:
        ValueError: not exactly one description is given, one that is needed is missing, or CPU data
            is out of range.
    """
    given = [n for n, v in (("indices", indices), ("counts", counts), ("offsets", offsets))
             if v is not None]  # fmt: skip
    if len(given) != 1:
        raise ValueError(
            "ikbo.candidate_map: expected exactly one of indices, counts and offsets, got "
            f"{' and '.join(given) or 'none'}."
        )
    if indices is not None:
        return _from_indices(_as_integers("indices", indices), n_users).to(_target(device, indices))
    if n_users is not None:
        raise ValueError(f"ikbo.candidate_map: n_users goes with indices, {given[0]} imply it.")
    if counts is not None:
        each = _as_integers("counts", counts)
        if each.device.type == "cpu" and bool((each < 0).any()):
            raise ValueError(f"ikbo.candidate_map: expected counts >= 0, got {int(each.min())}.")
        bounds = torch.cat([each.new_zeros(1), each.cumsum(0)])
        return _from_offsets(bounds, n_candidates).to(_target(device, counts))
    assert offsets is not None
    return _from_offsets(_as_integers("offsets", offsets), n_candidates).to(
        _target(device, offsets)
    )


def _as_integers(name: str, values: Integers) -> Tensor:
    tensor = torch.as_tensor(values) if len(values) else torch.zeros(0, dtype=torch.int32)
    if isinstance(values, Tensor):
        tensor = values
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise ValueError(
            f"ikbo.candidate_map: expected {name} as a 1-D sequence of integers, got "
            f"{tensor.dtype} of shape {list(tensor.shape)}."
        )
    return tensor if tensor.dtype in (torch.int32, torch.int64) else tensor.to(torch.int64)


def _in_range(users: Tensor, n_users: int) -> Tensor:
    return (users >= PADDING_ROW) & (users < n_users)


def _check_range(users: Tensor, n_users: int) -> None:
    wrong = ~_in_range(users, n_users)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"ikbo.candidate_map: expected users in [0, {n_users}) or -1 for padding, got "
            f"{int(users[row])} in row {row}. Correct the index or raise n_users."
        )


def _target(device: torch.device | str | None, values: Integers) -> torch.device | str:
    if device is not None:
        return device
    return values.device if isinstance(values, Tensor) else "cpu"


def _from_indices(indices: Tensor, n_users: int | None) -> CandidateMap:
    if n_users is None:
        raise ValueError(
            "ikbo.candidate_map: indices need n_users, the number of rows on the user side. "
            "Pass n_users=e_user.shape[0]."
        )
    if indices.device.type == "cpu":
        _check_range(indices, n_users)
    # Grouped from the wide type: int64 values that int32 would wrap stay out of range.
    order, user_offsets = group_candidates(indices, n_users)
    narrow = torch.where(_in_range(indices, n_users), indices, -2).to(torch.int32)
    return CandidateMap(narrow, user_offsets, order)


def _from_offsets(offsets: Tensor, n_candidates: int | None) -> CandidateMap:
    if offsets.shape[0] == 0:
        raise ValueError("ikbo.candidate_map: expected offsets of length U + 1 >= 1, got 0.")
    if offsets.device.type == "cpu":
        total = int(offsets[-1])
        if int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
            raise ValueError(
                "ikbo.candidate_map: expected offsets ascending from 0, got "
                f"{offsets[:8].tolist()}{'...' if offsets.shape[0] > 8 else ''}."
            )
        if n_candidates is not None and n_candidates < total:
            raise ValueError(
                f"ikbo.candidate_map: n_candidates={n_candidates} is below the {total} candidates "
                "that the users have."
            )
        n_candidates = total if n_candidates is None else n_candidates
    if n_candidates is None:
        raise ValueError(
            "ikbo.candidate_map: counts and offsets on a GPU need n_candidates, the batch size."
        )
    rows = torch.arange(n_candidates, device=offsets.device)
    users = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
    # Rows past the last user's are padding.
    users = torch.where(users < offsets.shape[0] - 1, users, PADDING_ROW)
    return CandidateMap(users.to(torch.int32), offsets.to(torch.int32))


def map_arguments(
    cand_to_user: CandidateMap | Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The three map arguments of an op, from a CandidateMap or a bare tensor."""
    if isinstance(cand_to_user, CandidateMap):
        return cand_to_user.cand_to_user, cand_to_user.user_offsets, cand_to_user.order
    return cand_to_user, None, None
