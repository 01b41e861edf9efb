"""How the norm kernels lay rows over threads (ikbo._host), over lengths, element sizes, devices."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo import _host

from .sanitizer_workload import NORM_COLUMNS

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
    assert mapping.thread_vectors in (1, 2, 3, 4, 5, 9)
    if mapping.in_warp:
        assert mapping.cluster == 1
        assert mapping.lanes in (1, 2, 4, 8, 16, 32)
        if mapping.interleaved and not backward:
            assert mapping.warps == 4
        else:
            assert mapping.warps == (8 if not backward or mapping.thread_vectors > 4 else 12)
    else:
        assert mapping.thread_vectors <= 4
        assert mapping.lanes == 32 * mapping.warps <= 512
    # Rows that would leave slots idle are interleaved. Others take either of two kernels: that of
    # full ones, and that of any address.
    assert mapping.interleaved or mapping.idle_slots == 0
    for full in {True, mapping.interleaved}:
        most = _host.norm_max_threads(backward, mapping.thread_vectors, mapping.in_warp, full)
        assert 32 * mapping.warps <= most
    # Every CTA of a cluster has columns, but of interleaved ones from a multiple of a vector on.
    assert (mapping.cluster - 1) * mapping.cta_columns < n
    aligned = mapping.cta_columns % mapping.vector == 0
    assert mapping.cluster == 1 or aligned or mapping.interleaved


@settings(max_examples=60, deadline=None)
@given(columns, element_bytes, directions)
def test_slots_that_interleaved_rows_count_on(n: int, size: int, backward: bool) -> None:
    """Those that the kernels (norm/loose.cuh) don't ask about; and the choice of kernels."""
    m = _host.norm_mapping(n, size, backward)
    if m.looped or not m.interleaved:
        return
    if m.in_warp:
        assert (m.lanes, m.thread_vectors) in {
            (8, 1), (8, 2), (16, 2), (16, 3), (32, 2), (32, 3), (32, 4)
        }  # fmt: skip
    else:
        assert m.thread_vectors == (2 if backward else 4)
        assert backward or m.warps <= 8
    vectors = m.thread_vectors - 1 if m.in_warp else m.thread_vectors // 2
    slots = vectors * m.vector
    # The forward's kernel for nearly full warps, which run_norm_forward() chooses (norm/norm.cu).
    most = 28 * 2 // size
    if not m.in_warp and m.cluster == 1 and m.cta_columns // m.warps // 32 >= most:
        slots = most
    for cta in {0, m.cluster - 1}:
        for thread in range(m.lanes):
            for slot in range(slots):
                assert m.column(cta, thread, *divmod(slot, m.vector)) >= 0


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "n", [64, 128, 192, 256, 384, 512, 576, 640, 768, 1024, 1152, 1536, 2048, 2560, 4096, 5120,
          7168, 8192, 12288, 16384, 32768, 65536, 131072, 262144]
)  # fmt: skip
def test_usual_lengths_leave_no_thread_idle(n: int, backward: bool) -> None:
    mapping = _host.norm_mapping(n, 2, backward)
    assert not mapping.looped
    assert mapping.idle_slots == 0


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_the_sanitizer_sees_every_kernel(size: int, backward: bool) -> None:
    seen = set()
    for columns in NORM_COLUMNS:
        m = _host.norm_mapping(columns if size == 2 else -(-columns // 2), size, backward)
        seen.add((min(m.lanes, 64) if m.interleaved else m.in_warp, m.thread_vectors))
    assert len(seen) == (5 if backward else 6) + 4 + 7 + 1


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
    st.booleans(), st.sampled_from(DEVICES), st.sampled_from([1, 1, 5, 32, 200]), st.booleans(),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_config(
    rows: int, n: int, staged: list[int], backward: bool, bias: bool, device: _host.DeviceLimits,
    groups: int, aligned: bool, usual: bool, layer: bool,
) -> None:  # fmt: skip
    if backward:
        staged = [*staged, 2]
    operands = tuple([*staged, 0, 0][:3])
    usual &= groups == 1
    config = _host.norm_config(
        rows, n, operands, bias, backward, device, groups, aligned, usual, layer
    )
    mapping = config.mapping
    assert json.loads(repr(config))["grid"] == config.grid
    if mapping.looped:
        return
    # Whole rows lie in one CTA, some of them as the halves of 1024 threads.
    in_cta = mapping.cluster == 1 or (
        usual and not layer and mapping.cluster == 2 and mapping.thread_vectors == 4
    )
    assert config.whole == (aligned and in_cta and not backward and mapping.idle_slots == 0)
    ctas = 1 if config.whole else mapping.cluster
    assert config.grid % (ctas * groups) == 0
    teams = config.grid // ctas // groups
    if config.whole or config.direct:
        assert not backward and config.shared_bytes == config.parameter_bytes <= SHARED_BYTES
        each = mapping.warps * max(1, 32 // mapping.lanes) if mapping.in_warp else 1
        assert teams == -(-rows // each)
        return
    if config.wide:
        assert aligned and usual and mapping.cluster > 1 and mapping.thread_vectors >= 3
        assert 1 <= teams <= max(1, -(-rows // 2)) and config.owners == teams
        assert config.shared_bytes == 6 * 16 * mapping.thread_vectors * mapping.lanes
        assert config.shared_bytes + STATIC_BYTES <= SHARED_BYTES
        return
    units = mapping.interleaved and not backward  # which have no ring
    if units:
        assert config.stages == 1 and config.owners >= config.blocks and not config.by_ticket
    else:
        assert (1 if mapping.in_warp else 2) <= config.stages <= 6
    assert config.shared_bytes + STATIC_BYTES <= SHARED_BYTES
    assert config.rings == (mapping.warps if mapping.in_warp else 1)
    assert config.rows_per_stage % max(1, 32 // mapping.lanes) == 0
    assert not backward or mapping.in_warp or config.rows_per_stage <= 2
    # A vector of weight and one of bias for each of a thread's; what stages hold is aligned.
    kept = 32 * mapping.warps * mapping.thread_vectors * 32
    assert config.parameter_bytes == (kept if config.keeps_parameters else 0)
    assert not (backward and config.keeps_parameters)
    assert config.stage_bytes % 128 == config.ring_bytes % 16 == 0
    assert all(pitch % 16 == 0 for pitch in config.pitches)
    assert not (config.by_ticket and config.paced)
    assert not config.paced or mapping.cluster > 1
    assert not (backward and config.paced) and (backward or config.lead == 0)
    # The rows of a stage, each of which may begin and end within 16 bytes.
    spans = [-(-mapping.cta_columns * size // 16) * 16 + 16 if size else 0 for size in operands]
    assert config.pitches == spans
    # In units results begin up to 16 bytes before what they replace, and lanes read on behind it.
    read_on = 4 * mapping.lanes if mapping.in_warp else 8 * 32  # elements
    slack = 16 * len(staged) + 4 * read_on if units else 0
    assert config.stage_bytes >= sum(spans) * config.rows_per_stage + slack
    # Blocks cover the rows. No CTA and no partial without rows.
    if mapping.interleaved:
        assert mapping.in_warp or config.rows_per_stage == 1 or not backward
    assert 0 <= config.blocks * config.rows_per_stage - rows < config.rows_per_stage
    assert teams == config.partials == -(-config.owners // config.rings)
    assert teams <= -(-config.blocks // config.rings)
    if backward and config.rings > 1:  # where the sums of the warps are added up
        assert config.ring_bytes >= config.sum_bytes
    if not backward:
        assert config.shared_bytes == config.ring_bytes + config.parameter_bytes
    if backward and bias:
        held = mapping.interleaved if mapping.in_warp else mapping.thread_vectors <= 2
        assert config.shared_bytes == config.ring_bytes + (0 if held else config.sum_bytes)


@pytest.mark.parametrize(("rows", "n"), [(131072, 128), (32768, 256), (32768, 512)])
def test_ctas_of_the_backward_have_about_the_same_rows(rows: int, n: int) -> None:
    config = _host.norm_config(rows, n, (2, 2, 0), True, True, H200)
    # Warp w of CTA t has the blocks of ring w * partials + t, as in norm/backward_sm90.cuh.
    for cta in (0, config.partials - 1):
        rings = [warp * config.partials + cta for warp in range(config.rings)]
        blocks = sum(-(-(config.blocks - ring) // config.owners) for ring in rings)
        assert blocks * config.rows_per_stage * config.partials <= 1.02 * rows


@given(
    st.integers(0, 200_000), columns, element_bytes, st.booleans(), st.booleans(),
    st.sampled_from(DEVICES), st.sampled_from([1, 1, 5]),
)  # fmt: skip
def test_backward_of_whole_rows(
    rows: int, n: int, size: int, layer: bool, bias: bool, device: _host.DeviceLimits, groups: int
) -> None:
    config = _host.norm_backward_config(rows, n, (size, size, 0), layer, bias, device, groups)
    whole, mapping = config.whole, config.rings.mapping
    assert json.loads(repr(config))["grid"] == config.rings.grid
    assert config.partials == max(config.rings.partials, whole.partials)
    if whole.apart:
        assert rows * n <= 2**20 and rows <= 128
    if mapping.looped or mapping.interleaved or groups > 1:
        assert not whole.has_kernel and not whole.apart
    if not whole.has_kernel:
        return
    # The mapping's threads, on which the order of a row's sums depends.
    assert (whole.lanes, whole.vectors) == (mapping.lanes, mapping.thread_vectors)
    assert whole.cluster == mapping.cluster and mapping.idle_slots == 0
    threads = 32 if mapping.in_warp else whole.lanes
    assert whole.teams * threads == 32 * whole.warps <= 1024
    assert whole.teams <= 15 or mapping.in_warp  # named barriers
    assert whole.grid % whole.cluster == 0 and whole.grid <= max(device.sm_count, whole.cluster)
    assert whole.partials == whole.grid // whole.cluster >= 1
    # No CTA without rows, but where there are none.
    blocks = -(-rows // whole.turn_rows)
    assert whole.partials <= max(1, -(-blocks // whole.teams))
    assert whole.shared_bytes + whole.static_bytes <= SHARED_BYTES
    # What is in L2 in the end, of x and grad_y, which are much more.
    row_bytes, last_rows = 2 * n * size, rows - whole.ordinary_from
    assert last_rows * row_bytes <= device.l2_bytes and (whole.evict_last or last_rows == 0)
    assert whole.evict_last == (whole.wide and rows * row_bytes > 16 * device.l2_bytes)
    assert whole.stages >= 2 and whole.shared_bytes >= whole.stages * whole.stage_bytes
    if not whole.wide:
        both = (layer or bias) and not whole.has_slots
        assert whole.shared_bytes >= whole.sum_bytes * (2 if both else 1)


def test_which_rows_have_kernels_of_their_own() -> None:
    usual = [128, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 12288, 16384, 32768, 65536, 131072,
             262144]  # fmt: skip
    for n in usual:
        for layer in (False, True):
            config = _host.norm_backward_config(32768, n, (2, 2, 0), layer, layer, H200)
            assert config.whole.has_kernel and not config.whole.apart
            # A residual's gradient goes through a ring, and so do rows of two types.
            for staged in ((2, 2, 2), (2, 4, 0)):
                others = _host.norm_backward_config(32768, n, staged, layer, layer, H200)
                assert not others.whole.has_kernel


@given(columns, element_bytes, directions, st.integers(1, 10**6), st.integers(1, 10**6))
def test_mapping_does_not_depend_on_the_rows(
    n: int, size: int, backward: bool, few: int, many: int
) -> None:
    """Nor on where rows lie."""
    layouts = {
        (m.lanes, m.thread_vectors, m.cluster, m.cta_columns, m.looped)
        for rows in (few, many)
        for aligned in (False, True)
        for config in [_host.norm_config(rows, n, (size, 2, 0), False, backward, H200, 1, aligned)]
        for m in [config.mapping]
    }
    assert len(layouts) == 1
