"""The GEMM's configuration (ikbo._host): kernel, grid and tile order, over problems and devices."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ikbo import _host

SHARED_BYTES = 227 * 1024
H200 = _host.DeviceLimits(132, 50 * 2**20, SHARED_BYTES)
DEVICES = [
    H200,
    _host.DeviceLimits(114, 50 * 2**20, SHARED_BYTES),
    _host.DeviceLimits(78, 60 * 2**20, SHARED_BYTES),
    _host.DeviceLimits(7, 10 * 2**20, SHARED_BYTES),  # under a limit on SMs
    _host.DeviceLimits(1, 50 * 2**20, SHARED_BYTES),
]
CUBE = {size: (size, size, size, 1) for size in (2048, 4096, 8192)}

devices = st.sampled_from(DEVICES)
# Mostly sizes that fill tiles, and some that don't.
sizes = st.integers(1, 4000) | st.integers(1, 24).map(lambda tiles: 128 * tiles)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def operand_bytes_per_k(kernel: object, tiles: list[tuple[int, int, int]]) -> int:
    """Distinct operand rows that these tiles read, times the two bytes of one element of each."""
    rows = len({(batch, m) for batch, m, _ in tiles}) * kernel.tile_m
    columns = len({(batch, n) for batch, _, n in tiles}) * kernel.tile_n
    return 2 * (rows + columns)


def wave(config: object, index: int) -> list[tuple[int, int, int]]:
    tiles = range(index * config.grid, min((index + 1) * config.grid, config.order.tiles))
    return [config.order.tile_of(tile) for tile in tiles]


# ---- division ----------------------------------------------------------------------------------


@given(dividend=st.integers(0, 2**31 - 1), divisor=st.integers(1, 2**31 - 1) | st.integers(1, 999))
@example(dividend=2**31 - 1, divisor=1)
@example(dividend=2**31 - 1, divisor=2**31 - 1)
@example(dividend=2**31 - 2, divisor=2**31 - 1)
@example(dividend=2**31 - 1, divisor=2**30 + 1)
def test_fast_divisor(dividend: int, divisor: int) -> None:
    # Around a multiple of the divisor a wrong rounding shows.
    multiple = dividend // divisor * divisor
    for value in (dividend, multiple, max(multiple - 1, 0)):
        assert _host.fast_divide(value, divisor) == value // divisor


# ---- tile order --------------------------------------------------------------------------------


@given(
    m_tiles=st.integers(1, 40),
    n_tiles=st.integers(1, 40),
    batch=st.integers(1, 3),
    cluster_m=st.sampled_from([1, 2]),
    groups_along_n=st.booleans(),
    group=st.integers(1, 20),
)
def test_order_visits_each_tile_once(
    m_tiles: int, n_tiles: int, batch: int, cluster_m: int, groups_along_n: bool, group: int
) -> None:
    order = _host.TileOrder(m_tiles, n_tiles, batch, cluster_m, groups_along_n, group)
    visited = [order.tile_of(tile) for tile in range(order.tiles)]
    padded_m_tiles = ceil_div(m_tiles, cluster_m) * cluster_m
    every = itertools.product(range(batch), range(padded_m_tiles), range(n_tiles))
    assert sorted(visited) == list(every)

    # The CTAs of a cluster: neighbours along M, on the same rows of B.
    for first in range(0, order.tiles, cluster_m):
        b, m, n = visited[first]
        assert m % cluster_m == 0
        assert visited[first : first + cluster_m] == [(b, m + r, n) for r in range(cluster_m)]


@pytest.mark.parametrize("groups_along_n", [False, True])
def test_order_walks_in_groups_and_back(groups_along_n: bool) -> None:
    order = _host.TileOrder(5, 5, 1, 1, groups_along_n, 3)
    # The first group: three wide, from place 0 to 4. The second: the two left, from 4 to 0.
    expected = [(g, w) for w in range(5) for g in range(3)]
    expected += [(g, w) for w in reversed(range(5)) for g in (3, 4)]
    visited = [order.tile_of(tile)[1:] for tile in range(order.tiles)]
    assert visited == [(w, g) if groups_along_n else (g, w) for g, w in expected]


def test_order_of_the_most_tiles() -> None:
    order = _host.TileOrder(2**15, 2**14, 2, 1, False, 8)
    assert order.tiles == 2**30
    assert order.tile_of(0) == (0, 0, 0)
    assert order.tile_of(2**29 - 1) == (0, 2**15 - 1, 0)  # the last group is odd: it walks back
    assert order.tile_of(2**29) == (1, 0, 0)
    assert order.tile_of(2**30 - 1) == (1, 2**15 - 1, 0)
    with pytest.raises(IndexError):
        order.tile_of(2**30)


# ---- kernels -----------------------------------------------------------------------------------


def test_kernels_fit_an_sm() -> None:
    kernels = _host.gemm_kernels()
    assert len({repr(kernel) for kernel in kernels}) == len(kernels) <= 8
    for kernel in kernels:
        stage = 2 * 64 * (kernel.tile_m + kernel.tile_n)
        staging = 2 * 16 * 1024
        assert stage * kernel.stages + staging + 1024 <= kernel.shared_bytes <= SHARED_BYTES
        # One more stage wouldn't fit.
        assert kernel.shared_bytes + stage > SHARED_BYTES
        rows = kernel.tile_m if kernel.schedule == "ping_pong" else kernel.tile_m // 2
        assert rows % 64 == 0
        assert kernel.accumulators == rows * kernel.tile_n // 128 <= 208


# ---- config ------------------------------------------------------------------------------------


@given(M=sizes, N=sizes, K=st.integers(0, 9000), batch=st.integers(1, 3), device=devices)
@example(M=1, N=1, K=0, batch=1, device=H200)
@example(M=8192, N=8192, K=8192, batch=1, device=H200)
@example(M=128 * 33, N=8192, K=8192, batch=1, device=H200)  # an odd number of M tiles
def test_config_covers_the_output_once(M: int, N: int, K: int, batch: int, device: object) -> None:
    config = _host.gemm_config(M, N, K, batch, device)
    assert _host.gemm_decline_reason(M, N, K, batch, device) is None
    kernel = config.kernel

    assert 1 <= config.grid <= device.sm_count
    assert config.grid % kernel.cluster_m == 0
    assert config.grid <= config.order.tiles
    # No SM that could hold another cluster stands idle while some CTA has two tiles.
    assert config.waves == 1 or config.grid + kernel.cluster_m > device.sm_count
    assert kernel.shared_bytes <= device.max_shared_bytes_per_cta
    assert config.k_steps == ceil_div(K, 64)
    assert (config.m_tiles, config.n_tiles) == (
        ceil_div(M, kernel.tile_m),
        ceil_div(N, kernel.tile_n),
    )

    by_cta = [config.tiles_of_cta(cta) for cta in range(config.grid)]
    visits = Counter(tile for tiles in by_cta for tile in tiles)
    real = {tile for tile in visits if tile[1] < config.m_tiles}
    assert real == set(
        itertools.product(range(batch), range(config.m_tiles), range(config.n_tiles))
    )
    assert set(visits.values()) == {1}
    # Padding is at most one M tile a column, and only where a pair has an odd one.
    padding = (config.m_tiles % kernel.cluster_m) * config.n_tiles * batch
    assert len(visits) == len(real) + padding

    # No CTA idles, none has two tiles more than another, and pairs have equally many.
    counts = [len(tiles) for tiles in by_cta]
    assert min(counts) >= 1
    assert max(counts) == config.waves <= min(counts) + 1
    assert counts[:: kernel.cluster_m] == counts[kernel.cluster_m - 1 :: kernel.cluster_m]

    # Ping-pong consumers take turns on the tiles of their CTA.
    for cta in {0, config.grid // 2, config.grid - 1}:
        for consumer in (0, 1):
            assert config.tiles_of_consumer(cta, consumer) == by_cta[cta][consumer::2]


@given(M=sizes, N=sizes, K=st.integers(0, 9000), batch=st.integers(1, 3), device=devices)
def test_estimates_stay_below_peak_and_grow_with_the_work(
    M: int, N: int, K: int, batch: int, device: object
) -> None:
    config = _host.gemm_config(M, N, K, batch, device)
    assert config.clocks > 0
    assert 0 <= config.utilisation <= 1
    # More work never takes fewer clocks.
    assert _host.gemm_config(M, N, K + 64, batch, device).clocks >= config.clocks
    assert _host.gemm_config(M, N, K, batch + 1, device).clocks >= config.clocks


def test_one_cta_loads_no_faster_than_an_sm_can() -> None:
    config = _host.gemm_config(64, 128, 64 * 1000, 1, H200)
    assert config.grid == 1
    assert config.clocks >= 1000 * 2 * 64 * (64 + 128) / 64


@pytest.mark.parametrize("shape", [(0, 5, 5, 1), (5, 0, 5, 1), (5, 5, 5, 0), (0, 0, 0, 0)])
def test_nothing_to_launch(shape: tuple[int, int, int, int]) -> None:
    assert _host.gemm_config(*shape, H200) is None
    assert _host.gemm_decline_reason(*shape, H200) is None


def test_without_k_the_output_is_still_written() -> None:
    config = _host.gemm_config(300, 300, 0, 1, H200)
    assert config.k_steps == 0
    assert config.grid >= 1


@pytest.mark.parametrize(
    ("shape", "device", "word"),
    [
        ((2**31, 1, 1, 1), H200, "2^31"),
        ((1, 1, 2**31, 1), H200, "2^31"),
        ((1, 1, 1, 2**31 - 1), H200, "tiles"),
        ((2**31 - 1, 2**31 - 1, 1, 2**31 - 1), H200, "tiles"),
        ((9, 9, 9, 1), _host.DeviceLimits(170, 96 * 2**20, 99 * 1024), "shared memory"),
        ((9, 9, 9, 1), _host.DeviceLimits(0, 0, SHARED_BYTES), "SMs"),
    ],
)
def test_declines_with_a_reason(
    shape: tuple[int, int, int, int], device: object, word: str
) -> None:
    assert word in _host.gemm_decline_reason(*shape, device)
    assert _host.gemm_config(*shape, device) is None


@pytest.mark.parametrize("size", [4096, 8192])
def test_large_cubes_get_pairs_of_large_tiles(size: int) -> None:
    kernel = _host.gemm_config(*CUBE[size], H200).kernel
    assert {kernel.tile_m, kernel.tile_n} == {128, 256}
    assert kernel.cluster_m == 2
    assert kernel.schedule == "cooperative"


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((8192, 8192, 8192, 1), "128x256x64_cooperative_cluster2"),
        ((4224, 1024, 4096, 1), "128x256x64_cooperative_cluster1"),  # 33 x 4 tiles: one wave
        ((8192, 768, 3072, 1), "128x128x64_ping_pong_cluster1"),  # 2.9 waves; 128x256 has 1.45
        ((384, 4096, 4096, 1), "128x128x64_ping_pong_cluster1"),
        ((64, 4096, 4096, 1), "64x128x64_ping_pong_cluster1"),
        ((11264, 384, 4096, 1), "256x128x64_cooperative_cluster2"),  # 1.5 tiles of 256
    ],
)
def test_each_kernel_has_its_problems(shape: tuple[int, int, int, int], name: str) -> None:
    assert repr(_host.gemm_config(*shape, H200).kernel) == f"gemm_sm90_{name}"


# ---- locality ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES[:3])
@pytest.mark.parametrize(
    "shape", [CUBE[2048], CUBE[4096], (8192, 6144, 768, 1), (8192, 768, 3072, 1)]
)
def test_operands_of_a_wave_fit_in_l2(shape: tuple[int, int, int, int], device: object) -> None:
    config = _host.gemm_config(*shape, device)
    for index in range(config.waves):
        bytes_of_wave = shape[2] * operand_bytes_per_k(config.kernel, wave(config, index))
        assert bytes_of_wave <= device.l2_bytes


@pytest.mark.parametrize("device", DEVICES[:3])
def test_waves_of_a_large_cube_are_nearly_square(device: object) -> None:
    # Even a square of 132 tiles of 128 x 256 reads 68 MB here, more than L2: what counts is that
    # each byte of it serves as many CTAs as it can, while they are at the same place along K.
    config = _host.gemm_config(*CUBE[8192], device)
    area = config.grid * config.kernel.tile_m * config.kernel.tile_n
    square = 2 * 2 * math.sqrt(area)
    waves = [operand_bytes_per_k(config.kernel, wave(config, i)) for i in range(config.waves)]
    assert sum(waves) / len(waves) <= 1.25 * square
    # CTAs may be as many as 32 steps of K apart and still find in L2 what another has read.
    assert 32 * 64 * max(waves) <= device.l2_bytes / 2


def dram_bytes(config: object, order: object, K: int, l2_bytes: int) -> int:
    """Operand bytes that waves of the grid read past an LRU L2, half of it counted."""
    panel = {"A": 2 * K * config.kernel.tile_m, "B": 2 * K * config.kernel.tile_n}
    cached: dict[tuple[str, int], None] = {}  # least recently used first
    read = 0
    for first in range(0, order.tiles, config.grid):
        tiles = [
            order.tile_of(tile) for tile in range(first, min(first + config.grid, order.tiles))
        ]
        touched = {("A", m) for _, m, _ in tiles} | {("B", n) for _, _, n in tiles}
        read += sum(panel[operand] for operand, i in touched - cached.keys())
        for key in touched:
            cached.pop(key, None)
            cached[key] = None
        size = sum(panel[operand] for operand, _ in cached)
        # CTAs advance along K together: a wave that doesn't fit leaves nothing of use.
        if sum(panel[operand] for operand, _ in touched) > l2_bytes / 2:
            cached.clear()
        while cached and size > l2_bytes / 2:
            operand, i = next(iter(cached))
            del cached[operand, i]
            size -= panel[operand]
    return read


def test_order_is_near_the_best_in_a_simulated_l2() -> None:
    random = Random(0)
    ours, ungrouped = [], []
    while len(ours) < 40:
        m, n, K = random.randint(8, 40), random.randint(8, 40), random.randint(64, 16384)
        device = random.choice(DEVICES[:3])
        config = _host.gemm_config(256 * m, 256 * n, K, 1, device)
        if config.waves < 3:
            continue
        shape = (config.m_tiles, config.n_tiles, 1, config.kernel.cluster_m)
        read = {
            (along_n, group): dram_bytes(
                config, _host.TileOrder(*shape, along_n, group), K, device.l2_bytes
            )
            for along_n in (False, True)
            for group in (1, 2, 4, 6, 8, 11, 16, config.group)
        }
        best = min(read.values())
        ours.append(read[config.groups_along_n, config.group] / best)
        ungrouped.append(read[False, 1] / best)
    assert max(ours) < 1.2
    assert sum(ours) / len(ours) < 1.04
    assert sum(ungrouped) / len(ungrouped) > 1.5


def test_group_follows_l2() -> None:
    # Where waves fit in L2, large groups save walks over the other operand; else squares do best.
    def group(l2_mib: int) -> int:
        device = _host.DeviceLimits(132, l2_mib * 2**20, SHARED_BYTES)
        return _host.gemm_config(32768, 32768, 2048, 1, device).group

    assert 6 <= group(10) <= 11
    assert group(80) == 16


# ---- explain -----------------------------------------------------------------------------------


def test_config_prints_as_json() -> None:
    config = _host.gemm_config(*CUBE[8192], H200)
    assert json.loads(repr(config)) == {
        "kernel": "gemm_sm90_128x256x64_cooperative_cluster2",
        "stages": 4,
        "shared_bytes": 232448,
        "grid": 132,
        "m_tiles": 64,
        "n_tiles": 32,
        "k_steps": 128,
        "waves": 16,
        "groups_along": "M",
        "group": config.group,
        "estimated_clocks": int(config.clocks),
        "estimated_utilisation": pytest.approx(config.utilisation, abs=1e-6),
    }
