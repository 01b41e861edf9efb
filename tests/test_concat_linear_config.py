"""How concat_linear is computed (ikbo._host): launches, the users' product, the candidates'."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikbo import _host

from .test_gemm_config import DEVICES, H200, sizes

features = st.integers(0, 3000)
JOIN_KERNELS = {
    f"gemm_sm90_{name}"
    for name in (
        "128x256x64_cooperative_cluster1", "128x128x64_ping_pong_cluster1",
        "64x128x64_ping_pong_cluster1",
    )
}  # fmt: skip


@given(
    B=sizes, U=st.integers(0, 3000), N=st.integers(1, 300), Kc=st.integers(1, 3000), Ku=features,
    device=st.sampled_from(DEVICES),
)  # fmt: skip
def test_every_problem_has_a_config(
    B: int, U: int, N: int, Kc: int, Ku: int, device: object
) -> None:
    problem = (B, U, 8 * N, Kc, Ku, device)
    assert _host.concat_linear_decline_reason(*problem) is None
    config = _host.concat_linear_config(*problem)
    candidates = config.candidates
    assert repr(candidates.kernel) in JOIN_KERNELS
    assert candidates.k_steps == -(-Kc // 64)
    assert candidates.m_tiles * candidates.kernel.tile_m >= B
    assert candidates.n_tiles * candidates.kernel.tile_n >= 8 * N
    has_product = U > 0 and Ku > 0
    assert config.launches == 1 + has_product
    assert config.few_users + (config.users is not None) == has_product
    if config.users is not None:
        assert repr(config.users.kernel) in JOIN_KERNELS
        assert config.users.k_steps == -(-Ku // 64)
        assert config.users.m_tiles * config.users.kernel.tile_m >= U


@pytest.mark.parametrize(("U", "few"), [(1, True), (30, True), (60, True), (4096, False)])
def test_few_users_get_a_kernel_of_their_own(U: int, few: bool) -> None:
    assert _host.concat_linear_config(4096, U, 1024, 1024, 2048, H200).few_users == few


@pytest.mark.parametrize(
    ("problem", "kernel", "ctas"),
    [
        ((200, 1, 512, 512, 1024), "64x128x64_ping_pong_cluster1", 16),
        ((2000, 1, 512, 512, 1024), "64x128x64_ping_pong_cluster1", 128),
        ((2048, 30, 1024, 1024, 2048), "128x128x64_ping_pong_cluster1", 128),
        ((8192, 17, 512, 1024, 2048), "128x256x64_cooperative_cluster1", 128),
    ],
)
def test_ranking_problems_fill_the_gpu_once(
    problem: tuple[int, ...], kernel: str, ctas: int
) -> None:
    candidates = _host.concat_linear_config(*problem, H200).candidates
    assert repr(candidates.kernel) == f"gemm_sm90_{kernel}"
    assert (candidates.grid, candidates.waves) == (ctas, 1)


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        ((9, 2, 12, 4, 6), "multiple of 8"),
        ((9, 2, 16, 0, 6), "without features"),
        ((2**31, 2, 16, 4, 6), "2^31"),
        ((9, 2, 16, 4, 2**31), "2^31"),
        ((9, 2**30, 64, 4, 0), "64 GiB"),
    ],
)
def test_declines_with_a_reason(problem: tuple[int, ...], word: str) -> None:
    assert word in _host.concat_linear_decline_reason(*problem, H200)
    with pytest.raises(ValueError, match="declined"):
        _host.concat_linear_config(*problem, H200)


def test_config_prints_as_json() -> None:
    few = json.loads(repr(_host.concat_linear_config(500, 1, 512, 512, 1024, H200)))
    assert few["kernel"] == "concat_linear_sm90"
    assert (few["launches"], few["packed_weights"]) == (2, 0)
    assert few["users"] == {"kernel": "few_rows_sm90"}
    assert few["candidates"]["grid"] == 32
    many = json.loads(repr(_host.concat_linear_config(500, 5000, 512, 512, 1024, H200)))
    assert many["users"]["kernel"] in JOIN_KERNELS
    given_part = json.loads(repr(_host.concat_linear_config(500, 5, 512, 512, 0, H200)))
    assert given_part["users"] is None and given_part["launches"] == 1
