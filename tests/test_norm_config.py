"""How the norm kernels lay rows over threads (ikbo._host), over lengths, element sizes, devices."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo import _host

SHARED_BYTES = 227 * 1024
STATIC_BYTES = 4096
H200 = _host.DeviceLimits(132, 50 * 2**20, SHARED_BYTES)
DEVICES = [H200, _host.DeviceLimits(78, 60 * 2**20, SHARED_BYTES),
           _host.DeviceLimits(1, 50 * 2**20, SHARED_BYTES)]  # fmt: skip

columns = (
    st.integers(1, 3000)
    | st.integers(1, 300_000)
    | st.integers(1, 2000).map(lambda n: 64 * n)
    | st.integers(0, 20).map(lambda n: 2**n)
)
element_bytes = st.sampled_from([2, 4])
directions = st.booleans()


def columns_of(mapping: _host.NormMapping) -> Counter[int]:
    slots = (
        mapping.column(cta, thread, v, e)
        for cta in range(mapping.cluster)
        for thread in range(mapping.lanes)
        for v in range(mapping.thread_vectors)
        for e in range(mapping.vector)
    )
    return Counter(slots)


@settings(max_examples=60, deadline=None)
@given(columns, element_bytes, directions)
def test_every_column_has_one_slot(n: int, size: int, backward: bool) -> None:
    mapping = _host.norm_mapping(n, size, backward)
    if mapping.looped:
        return
    taken = columns_of(mapping)
    assert taken.pop(-1, 0) == mapping.idle_slots
    assert sorted(taken) == list(range(n))
    assert set(taken.values()) == {1}


@given(columns, element_bytes, directions)
def test_threads(n: int, size: int, backward: bool) -> None:
    mapping = _host.norm_mapping(n, size, backward)
    assert mapping.vector * size == 16
    if mapping.looped:
        return
    assert mapping.cluster in (1, 2, 4, 8, 16)
    assert 1 <= mapping.thread_vectors <= mapping.kernel_vectors <= 9
    assert mapping.warps <= (8 if mapping.kernel_vectors == 9 else 16)
    if mapping.lanes <= 32:
        assert mapping.row_warps == mapping.cluster == 1
        assert mapping.lanes & (mapping.lanes - 1) == 0
    else:
        assert mapping.lanes == 32 * mapping.warps == 32 * mapping.row_warps
    # Every CTA of a cluster has columns, from a multiple of a vector on.
    assert (mapping.cluster - 1) * mapping.cta_columns < n
    assert mapping.cluster == 1 or mapping.cta_columns % mapping.vector == 0


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "n", [64, 128, 192, 256, 384, 512, 576, 640, 768, 1024, 1152, 1536, 2048, 2560, 4096, 5120,
          7168, 8192, 12288, 16384, 32768, 65536, 131072, 262144]
)  # fmt: skip
def test_usual_lengths_leave_no_thread_idle(n: int, backward: bool) -> None:
    mapping = _host.norm_mapping(n, 2, backward)
    assert not mapping.looped
    assert mapping.idle_slots == 0


def test_long_rows_take_clusters_and_longer_ones_a_loop() -> None:
    forward = {n: _host.norm_mapping(n, 2, False).cluster for n in (16384, 32768, 131072, 262144)}
    assert forward == {16384: 1, 32768: 2, 131072: 8, 262144: 16}
    backward = {n: _host.norm_mapping(n, 2, True).cluster for n in (8192, 16384, 131072, 262144)}
    assert backward == {8192: 1, 16384: 2, 131072: 16, 262144: 16}
    assert _host.norm_mapping(262145, 2, False).looped
    assert _host.norm_mapping(131072, 4, True).cluster == 16
    assert _host.norm_mapping(131073, 4, True).looped


@given(
    st.integers(0, 200_000), columns, st.lists(element_bytes, min_size=1, max_size=2), directions,
    st.booleans(), st.sampled_from(DEVICES),
)  # fmt: skip
def test_config(
    rows: int, n: int, staged: list[int], backward: bool, bias: bool, device: _host.DeviceLimits
) -> None:
    if backward:
        staged = [*staged, 2]
    config = _host.norm_config(rows, n, staged, bias, backward, device)
    mapping = config.mapping
    assert config.grid % mapping.cluster == 0
    assert json.loads(repr(config))["grid"] == config.grid
    if mapping.looped:
        return
    assert (2 if backward and mapping.lanes > 32 else 1) <= config.stages <= 6
    assert config.shared_bytes + STATIC_BYTES <= SHARED_BYTES
    assert config.rings == (mapping.warps if mapping.lanes <= 32 else 1)
    assert config.rows_per_stage % max(1, 32 // mapping.lanes) == 0
    # The rows of a stage, each of which may begin and end within 16 bytes.
    spans = sum(-(-mapping.cta_columns * size // 16) * 16 + 16 for size in staged)
    assert config.stage_bytes >= spans * config.rows_per_stage
    # No CTA and no partial without rows.
    blocks = -(-rows // (config.rows_per_stage * config.rings))
    assert config.partials == config.grid // mapping.cluster <= blocks
    if backward and config.rings > 1:  # where the sums of the warps are added up
        assert config.shared_bytes >= 4 * n * config.rings


@given(columns, element_bytes, directions, st.integers(1, 10**6), st.integers(1, 10**6))
def test_mapping_does_not_depend_on_the_rows(
    n: int, size: int, backward: bool, few: int, many: int
) -> None:
    layouts = {
        (m.lanes, m.row_warps, m.thread_vectors, m.cluster, m.cta_columns)
        for rows in (few, many)
        for m in [_host.norm_config(rows, n, [size, 2], False, backward, H200).mapping]
    }
    assert len(layouts) == 1
