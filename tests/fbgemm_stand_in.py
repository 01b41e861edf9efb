"""FBGEMM's sparse ops that ikbo.rewrite knows by name, in plain PyTorch, where it isn't installed.

Schemas and results are those of fbgemm-gpu 1.8.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

SCHEMAS = (
    "jagged_index_select(Tensor values, Tensor lengths, Tensor indices, "
    "int? num_dense_output_rows=None) -> Tensor[]",
    "index_select_dim0(Tensor input, Tensor indices, SymInt? consecutive_range_start=0, "
    "SymInt? consecutive_range_length=0, bool? skip_indices_sorting_fwd=None) -> Tensor",
    "group_index_select_dim0(Tensor[] input_group, Tensor[] indices_group) -> Tensor[]",
    "asynchronous_complete_cumsum(Tensor t_in) -> Tensor",
    "jagged_to_padded_dense(Tensor values, Tensor[] offsets, SymInt[] max_lengths, "
    "float padding_value=0.) -> Tensor",
    "reorder_batched_ad_lengths(Tensor cat_ad_lengths, Tensor batch_offsets, "
    "SymInt num_ads_in_batch, bool broadcast_lengths=False, SymInt max_batch_size=0) -> Tensor",
    "reorder_batched_ad_indices(Tensor cat_ad_offsets, Tensor cat_ad_indices, "
    "Tensor reordered_cat_ad_offsets, Tensor batch_offsets, SymInt num_ads_in_batch, "
    "bool broadcast_indices=False, SymInt num_indices_after_broadcast=-1) -> Tensor",
)


def complete_cumsum(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])


def rows(values: Tensor, lengths: Tensor) -> list[Tensor]:
    return list(values.split(lengths.tolist()))


def jagged_index_select(
    values: Tensor, lengths: Tensor, indices: Tensor, count: int | None = None
) -> list[Tensor]:
    of_each = rows(values, lengths)
    return [torch.cat([of_each[i] for i in indices.tolist()]), lengths[indices]]


def jagged_to_padded_dense(
    values: Tensor, offsets: list[Tensor], max_lengths: list[int], padding: float = 0.0
) -> Tensor:
    of_each = rows(values, offsets[0].diff())
    result = values.new_full((len(of_each), max_lengths[0], *values.shape[1:]), padding)
    for i, row in enumerate(of_each):
        result[i, : len(row)] = row[: max_lengths[0]]
    return result


def _ads(batch_offsets: Tensor) -> list[int]:
    """The request of each ad."""
    requests = torch.arange(len(batch_offsets) - 1)
    return requests.repeat_interleave(batch_offsets.diff().long().cpu()).tolist()


def reorder_lengths(
    lengths: Tensor, batch_offsets: Tensor, n_ads: int, broadcast: bool = False, most: int = 0
) -> Tensor:
    assert broadcast and most == 0
    return lengths.view(len(batch_offsets) - 1, -1)[_ads(batch_offsets)].T.flatten()


def reorder_indices(
    offsets: Tensor, indices: Tensor, reordered: Tensor, batch_offsets: Tensor, n_ads: int,
    broadcast: bool = False, count: int = -1,
) -> Tensor:  # fmt: skip
    """From the order of requests and tables to that of tables and ads (or requests)."""
    of_each, n = rows(indices, offsets.diff()), len(batch_offsets) - 1
    tables = len(of_each) // n
    requests = _ads(batch_offsets) if broadcast else range(n)
    return torch.cat([of_each[b * tables + t] for t in range(tables) for b in requests])


def _select_each(inputs: list[Tensor], indices: list[Tensor]) -> list[Tensor]:
    return [x[i] for x, i in zip(inputs, indices, strict=True)]


def _fake_jagged(
    values: Tensor, lengths: Tensor, indices: Tensor, n: object = None
) -> list[Tensor]:
    total = torch.library.get_ctx().new_dynamic_size()
    return [values.new_empty((total, *values.shape[1:])), lengths.new_empty(indices.shape)]


def _fake_reordered(lengths: Tensor, offsets: Tensor, n_ads: int, *_: object) -> Tensor:
    return lengths.new_empty(lengths.shape[0] // (offsets.shape[0] - 1) * n_ads)


def _fake_indices(
    offsets: Tensor, indices: Tensor, reordered: Tensor, batch: Tensor, n: int,
    broadcast: bool = False, count: int = -1,
) -> Tensor:  # fmt: skip
    return indices.new_empty(count if broadcast else indices.shape[0])


def install() -> None:
    """Registers the ops, or, where FBGEMM is installed, what it lacks."""
    library = torch.library.Library("fbgemm", "FRAGMENT")
    _KEPT.append(library)
    if importlib.util.find_spec("fbgemm_gpu") is not None:
        import fbgemm_gpu.sparse_ops  # noqa: F401

        library.impl("reorder_batched_ad_lengths", _fake_reordered, "Meta")
        library.impl("reorder_batched_ad_indices", _fake_indices, "Meta")
        library.impl("index_select_dim0", lambda x, i, *_: x[i], "Meta")
        return
    for schema in SCHEMAS:
        library.define(schema)
    library.impl("jagged_index_select", jagged_index_select, "CPU")
    library.impl("index_select_dim0", lambda x, i, *_: x[i], "CompositeExplicitAutograd")
    library.impl("group_index_select_dim0", _select_each,
                 "CompositeExplicitAutograd")  # fmt: skip
    library.impl("asynchronous_complete_cumsum", complete_cumsum, "CompositeExplicitAutograd")
    library.impl("jagged_to_padded_dense", jagged_to_padded_dense, "CPU")
    library.impl("reorder_batched_ad_lengths", reorder_lengths, "CPU")
    library.impl("reorder_batched_ad_indices", reorder_indices, "CPU")
    torch.library.register_fake("fbgemm::jagged_index_select", _fake_jagged)
    library.impl("jagged_to_padded_dense", _fake_dense, "Meta")
    library.impl("reorder_batched_ad_lengths", _fake_reordered, "Meta")
    library.impl("reorder_batched_ad_indices", _fake_indices, "Meta")


def _fake_dense(
    values: Tensor, offsets: list[Tensor], max_lengths: list[int], padding: float = 0.0
) -> Tensor:
    return values.new_empty((offsets[0].shape[0] - 1, max_lengths[0], *values.shape[1:]))


_KEPT: list[torch.library.Library] = []
