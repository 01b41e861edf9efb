"""How linear compression is computed (ikbo._host): kernels, plans and their estimated clocks."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ikbo import _host

from .test_gemm_config import DEVICES, H200, SHARED_BYTES, ceil_div, sizes

TILES_M = [224, 128, 64]  # of the kernels, in their order
KERNELS = _host.linear_compression_kernels()
M, N, KU, KC = 433, 256, 1178, 866  # the headline

devices = st.sampled_from(DEVICES)
columns = st.integers(1, 60).map(lambda n: 8 * n)


def headline(B: int, ratio: int, device: object = H200) -> object:
    return _host.linear_compression_plan(B, ceil_div(B, ratio), M, N, KC, KU, device)


# ---- kernels -----------------------------------------------------------------------------------


def test_kernels_fit_an_sm() -> None:
    assert [kernel.tile_m for kernel in KERNELS] == TILES_M
    for kernel in KERNELS:
        w, e, staging = (
            2 * rows * columns
            for rows, columns in (
                (kernel.tile_m, kernel.tile_k),
                (64, kernel.tile_k),
                (kernel.tile_m, 64),
            )
        )
        rings = kernel.w_stages * w + 2 * kernel.e_stages * e
        small = 4 * kernel.tile_m + 512  # bias, barriers
        assert rings + kernel.staging_buffers * staging + small + 1024 <= kernel.shared_bytes
        assert kernel.shared_bytes <= SHARED_BYTES
        assert 1 <= kernel.staging_buffers <= 2
        assert kernel.sums == kernel.tile_m * 64 // 128
        assert repr(kernel) == f"linear_compression_sm90_{kernel.tile_m}x128x{kernel.tile_k}"


# ---- configs -----------------------------------------------------------------------------------


def check_config(config: object, shape: tuple[int, int, int, int], device: object) -> None:
    rows, M, N, K = shape
    kernel, schedule = config.kernel, config.schedule
    assert kernel.shared_bytes <= device.max_shared_bytes_per_cta
    assert (config.m_tiles - 1) * kernel.tile_m < M <= config.m_tiles * kernel.tile_m
    assert (config.units_per_row - 1) * 64 < N <= config.units_per_row * 64
    assert schedule.units == rows * config.units_per_row
    assert schedule.consumers == 2
    assert (schedule.k_blocks - 1) * kernel.tile_k < K <= schedule.k_blocks * kernel.tile_k
    assert config.grid == config.m_tiles * schedule.workers
    # At most three CTAs an SM, one after another; but W has as many tiles as it has.
    assert schedule.workers == 1 or config.grid <= 3 * device.sm_count
    # No CTA is without work.
    assert schedule.tiles(schedule.workers - 1, 0) >= 1
    # What kernels count in int32.
    assert schedule.steps(0) < 2**31 and schedule.workers * 2 * schedule.tiles(0, 0) < 2**31
    assert 0 < config.utilisation <= 1


@given(
    rows=sizes, M=st.integers(1, 700), N=columns, K=sizes, device=devices,
    kernel=st.integers(0, len(KERNELS) - 1), adds_part=st.booleans(),
)  # fmt: skip
@example(rows=2**30, M=1, N=8, K=64, device=H200, kernel=0, adds_part=True)
@example(rows=2**30, M=1, N=8, K=64, device=DEVICES[-1], kernel=2, adds_part=True)
@example(rows=1, M=2**31 - 1, N=8, K=1, device=H200, kernel=2, adds_part=True)
@example(rows=1, M=1, N=64, K=2**31 - 1, device=H200, kernel=1, adds_part=True)
@example(rows=64, M=1, N=32, K=2**30, device=DEVICES[-1], kernel=1, adds_part=True)
@example(rows=1, M=9, N=2**31 - 8, K=65, device=H200, kernel=0, adds_part=False)
def test_every_kernel_has_a_config(
    rows: int, M: int, N: int, K: int, device: object, kernel: int, adds_part: bool
) -> None:
    shape = (rows, M, N, K)
    config = _host.linear_compression_config_of(kernel, *shape, adds_part, device)
    assert config.kernel.tile_m == TILES_M[kernel]
    check_config(config, shape, device)
    # A part to add takes time.
    if not adds_part:
        more = _host.linear_compression_config_of(kernel, *shape, True, device)
        assert more.clocks >= config.clocks


def test_config_of_asks_for_an_output_and_a_kernel() -> None:
    for shape in ((0, 1, 8, 1), (1, 0, 8, 1), (1, 1, 0, 1), (1, 1, 9, 1), (1, 1, 8, 0)):
        with pytest.raises(ValueError, match="without an output, or one that is declined"):
            _host.linear_compression_config_of(0, *shape, True, H200)
    for kernel in (-1, len(KERNELS)):
        with pytest.raises(IndexError):
            _host.linear_compression_config_of(kernel, 1, 1, 8, 1, True, H200)


# ---- plans -------------------------------------------------------------------------------------


@given(
    B=sizes, U=st.integers(0, 3000), M=st.integers(1, 700), N=columns, Kc=sizes,
    Ku=st.integers(0, 3000), device=devices,
)  # fmt: skip
def test_every_problem_has_a_plan(
    B: int, U: int, M: int, N: int, Kc: int, Ku: int, device: object
) -> None:
    plan = _host.linear_compression_plan(B, U, M, N, Kc, Ku, device)
    check_config(plan.candidates, (B, M, N, Kc), device)
    makes_part = U > 0 and Ku > 0
    assert (plan.users is not None) == makes_part
    if makes_part:
        check_config(plan.users, (U, M, N, Ku), device)


@given(
    B=st.integers(1, 300), U=st.integers(1, 40), M=st.integers(1, 500), N=columns,
    Kc=st.integers(1, 1500), Ku=st.integers(1, 1500), device=devices,
)  # fmt: skip
def test_no_plan_of_whole_launches_is_estimated_faster(
    B: int, U: int, M: int, N: int, Kc: int, Ku: int, device: object
) -> None:
    """Nor is one that runs side by side by chance: the plan may have made room for that."""
    HAND_OVER, EPILOGUE_BYTES_PER_CLOCK = 2500, 13

    def clocks(users: object, candidates: object) -> float:
        if users.grid + candidates.grid > device.sm_count:
            return users.clocks + candidates.clocks
        epilogue = 128 * candidates.kernel.tile_m / EPILOGUE_BYTES_PER_CLOCK
        return max(candidates.clocks, users.clocks + HAND_OVER + epilogue)

    plan = _host.linear_compression_plan(B, U, M, N, Kc, Ku, device)
    of_users, of_candidates = (
        [
            _host.linear_compression_config_of(kernel, *shape, device)
            for kernel in range(len(KERNELS))
        ]
        for shape in ((U, M, N, Ku, False), (B, M, N, Kc, True))
    )
    best = min(clocks(u, c) for u in of_users for c in of_candidates)
    assert clocks(plan.users, plan.candidates) <= best * (1 + 1e-9)


@pytest.mark.parametrize("device", DEVICES[:3], ids=lambda device: f"{device.sm_count}_SMs")
@pytest.mark.parametrize("ratio", [2, 70, 1000])
@pytest.mark.parametrize("B", [1, 8, 64, 512, 1024, 3072])
def test_headline_fills_the_gpu_once(B: int, ratio: int, device: object) -> None:
    plan = headline(B, ratio, device)
    candidates = plan.candidates
    check_config(candidates, (B, M, N, KC), device)
    check_config(plan.users, (ceil_div(B, ratio), M, N, KU), device)
    assert candidates.grid <= device.sm_count
    if B >= 512:
        assert candidates.kernel.tile_m == 224
        assert candidates.grid + 1 >= device.sm_count
        assert candidates.utilisation > 0.7


def test_shape_without_output_has_no_plan() -> None:
    for B, M, N in ((0, 5, 8), (5, 0, 8), (5, 5, 0)):
        assert _host.linear_compression_plan(B, 2, M, N, 9, 9, H200) is None
        assert _host.linear_compression_decline_reason(B, M, N, 9, H200) is None


SMALL_SHARED = _host.DeviceLimits(170, 96 * 2**20, 99 * 1024)


@pytest.mark.parametrize(
    ("shape", "device", "words"),
    [
        ((9, 9, 16, 0), H200, "K is 0"),
        ((9, 9, 12, 9), H200, "multiple of 8"),
        ((2**31, 1, 8, 1), H200, "2^31"),
        ((1, 2**31, 8, 1), H200, "2^31"),
        ((1, 1, 2**31, 1), H200, "2^31"),
        ((1, 1, 8, 2**31), H200, "2^31"),
        ((2**30 + 1, 1, 8, 1), H200, "blocks"),
        ((2**29, 1, 128, 65), H200, "blocks"),
        ((2**31 - 1, 1, 2**31 - 8, 2**31 - 1), H200, "blocks"),
        ((9, 9, 16, 9), SMALL_SHARED, "shared memory"),
        ((9, 9, 16, 9), _host.DeviceLimits(0, 0, SHARED_BYTES), "SMs"),
    ],
)
def test_declines_with_a_reason(
    shape: tuple[int, int, int, int], device: object, words: str
) -> None:
    rows, M, N, K = shape
    assert words in _host.linear_compression_decline_reason(*shape, device)
    assert _host.linear_compression_plan(rows, 0, M, N, K, 0, device) is None
    # What declines the users' product declines the call; but one that isn't made is no matter.
    if K > 0:
        assert _host.linear_compression_plan(1, rows, M, N, 1, K, device) is None
    if rows > 2**30 and device is H200:
        assert _host.linear_compression_plan(1, rows, 1, 8, 1, 0, device) is not None


def test_a_kernel_that_does_not_fit_is_left_out() -> None:
    smallest = min(KERNELS, key=lambda kernel: kernel.shared_bytes)
    limits = _host.DeviceLimits(132, 50 * 2**20, smallest.shared_bytes)
    for B in (1, 1024):
        plan = headline(B, 70, limits)
        assert repr(plan.candidates.kernel) == repr(smallest)
    none = _host.DeviceLimits(132, 50 * 2**20, smallest.shared_bytes - 1)
    assert "shared memory" in _host.linear_compression_decline_reason(1, M, N, KC, none)


# ---- estimates ---------------------------------------------------------------------------------

# Thousands of clocks of the slowest CTA on an H200, of each kernel: rows, M, N, K, adds a part.
MEASURED = {
    (1024, M, N, KC, True): {224: 461},
    (64, M, N, KC, True): {224: 39.5},
    (32, M, N, KC, True): {224: 23.1, 128: 26.0},
    (16, 128, 64, 512, False): {224: 9.0, 128: 8.2},
    (1, M, N, KC, True): {224: 12.9, 128: 11.0},
}


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_estimates_are_near_what_was_measured(shape: tuple[int, int, int, int, bool]) -> None:
    measured = MEASURED[shape]
    estimated = {
        tile_m: _host.linear_compression_config_of(TILES_M.index(tile_m), *shape, H200).clocks / 1e3
        for tile_m in measured
    }
    for tile_m, clocks in measured.items():
        assert estimated[tile_m] == pytest.approx(clocks, rel=0.12)
    assert sorted(measured, key=measured.__getitem__) == sorted(
        estimated, key=estimated.__getitem__
    )


@pytest.mark.parametrize(
    ("problem", "of_users", "of_candidates"),
    [
        ((1024, 512, M, N, KC, KU), 224, 224),
        ((64, 8, M, N, KC, KU), 64, 224),
        # Side by side: 28 CTAs and 64. By one kernel for both 12.4 us and more.
        ((8, 1, M, N, KC, KU), 64, 224),
        ((1, 1, M, N, KC, KU), 64, 64),
        ((1024, 15, 128, 64, 512, 512), 224, 128),  # 15 CTAs and 117
    ],
)
def test_the_fastest_kernels_are_chosen(
    problem: tuple[int, ...], of_users: int, of_candidates: int
) -> None:
    plan = _host.linear_compression_plan(*problem, H200)
    assert (plan.users.kernel.tile_m, plan.candidates.kernel.tile_m) == (of_users, of_candidates)


# ---- explain -----------------------------------------------------------------------------------


def test_plan_prints_as_json() -> None:
    plan = headline(1024, 70)
    printed = json.loads(repr(plan))
    assert printed["packed_weights"] == 0
    assert printed["users"] == json.loads(repr(plan.users))
    assert (
        printed["candidates"]
        == json.loads(repr(plan.candidates))
        == {
            "kernel": "linear_compression_sm90_224x128x64",
            "w_stages": 4,
            "e_stages": 4,
            "shared_bytes": plan.candidates.kernel.shared_bytes,
            "grid": 132,
            "m_tiles": 2,
            "units": 4096,
            "k_blocks": 14,
            "full_rounds": 31,
            "leftover_units": 4,
            "estimated_clocks": int(plan.candidates.clocks),
            "estimated_utilisation": pytest.approx(plan.candidates.utilisation, abs=1e-6),
        }
    )
    given_part = _host.linear_compression_plan(1024, 15, M, N, KC, 0, H200)
    assert json.loads(repr(given_part))["users"] is None
