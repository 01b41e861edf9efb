"""How gated_linear, linear_act and gated_mlp are computed (ikbo._host): kernels and launches."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikbo import _host

from .test_gemm_config import DEVICES, H200, sizes

KERNELS = {
    f"gemm_sm90_{name}"
    for name in (
        "128x256x64_cooperative_cluster1", "128x128x64_ping_pong_cluster2",
        "128x128x64_ping_pong_cluster1", "64x128x64_ping_pong_cluster1",
    )
}  # fmt: skip
OPS = ["linear_act", "gated_linear"]


def config_of(op: str, *problem: object) -> object:
    return getattr(_host, f"{op}_config")(*problem)


def reason_of(op: str, *problem: object) -> str | None:
    reason: str | None = getattr(_host, f"{op}_decline_reason")(*problem)
    return reason


@pytest.mark.parametrize("op", OPS)
@given(
    M=sizes.map(lambda M: M + 64), N=st.integers(2, 1500), K=st.integers(1, 9000),
    device=st.sampled_from(DEVICES),
)  # fmt: skip
def test_every_problem_has_a_config(op: str, M: int, N: int, K: int, device: object) -> None:
    problem = (M, 8 * N, K, device)
    assert reason_of(op, *problem) is None
    config = config_of(op, *problem)
    product = config.product
    assert config.launches == 1
    if isinstance(product, _host.WeightStreamConfig):
        assert product.k_steps == -(-K // 64)
        assert M <= 4096 and product.ctas <= device.sm_count
        return
    assert product.k_steps == -(-K // 64)
    assert repr(product.kernel) in KERNELS
    # Gate and up share a tile.
    columns = product.kernel.tile_n // (2 if op == "gated_linear" else 1)
    assert product.m_tiles == -(-M // product.kernel.tile_m)
    assert product.n_tiles == -(-8 * N // columns)
    assert 1 <= product.grid <= device.sm_count
    assert product.grid % product.kernel.cluster_m == 0
    assert 0 <= product.utilisation <= 1


@given(
    M=sizes, N=st.integers(1, 1500), K=st.integers(1, 4000), out=st.integers(1, 1500),
    device=st.sampled_from(DEVICES),
)  # fmt: skip
def test_mlp_is_a_gated_linear_and_a_linear(M: int, N: int, K: int, out: int, device: Any) -> None:
    config = _host.gated_mlp_config(M, 8 * N, K, 8 * out, device)
    assert config.launches == 2
    hidden = _host.gated_linear_config(M, 8 * N, K, device).product
    down = _host.linear_act_config(M, 8 * out, 8 * N, device).product
    assert repr(config.hidden) == repr(hidden)
    if isinstance(down, _host.WeightStreamConfig):
        # It streams ahead under the first's end, for which it may have more CTAs.
        assert isinstance(config.down, _host.WeightStreamConfig)
        assert down.ctas <= config.down.ctas <= max(down.ctas, 2 * device.sm_count)
    else:
        assert repr(config.down) == repr(down)


@pytest.mark.parametrize(
    ("problem", "hidden", "down"),
    [
        # M, N, K, out features
        (
            (8192, 3072, 768, 768),
            "gemm_sm90_128x128x64_ping_pong_cluster2",
            "gemm_sm90_128x128x64_ping_pong_cluster2",
        ),
        (
            (256, 11008, 4096, 4096),
            "gemm_sm90_128x128x64_ping_pong_cluster2",
            "gemm_sm90_64x128x64_ping_pong_cluster1",
        ),
        # A GEMM would have 64 tiles for 132 SMs.
        (
            (128, 11008, 4096, 4096),
            "gemm_sm90_128x256x64_cooperative_cluster1",
            "weight_stream_sm90_128x64x64",
        ),
        (
            (512, 4096, 1024, 1024),
            "gemm_sm90_128x128x64_ping_pong_cluster2",
            "weight_stream_sm90_128x64x64",
        ),
        ((64, 11008, 4096, 4096), "weight_stream_sm90_128x64x64", "weight_stream_sm90_128x64x64"),
    ],
)
def test_mlps_of_interest(problem: tuple[int, ...], hidden: str, down: str) -> None:
    config = json.loads(repr(_host.gated_mlp_config(*problem, H200)))
    assert config["hidden"]["kernel"] == hidden
    assert config["down"]["kernel"] == down


def test_the_epilogue_hides_under_products() -> None:
    """12 steps of K: a cooperative kernel would add its epilogue to every tile."""
    product = _host.gated_linear_config(8192, 3072, 768, H200).product
    assert product.utilisation > 0.9


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("problem", "word"),
    [
        ((9, 12, 4), "multiple of 8"),
        ((9, 16, 0), "without features"),
        ((2**31, 16, 4), "2^31"),
        ((2**31, 8, 4), "2^31"),
        ((99, 16, 2**31), "2^31"),
        ((2**31 - 1, 2**30 - 8, 4), "tiles"),
    ],
)
def test_declines_with_a_reason(op: str, problem: tuple[int, ...], word: str) -> None:
    assert word in str(reason_of(op, *problem, H200))
    with pytest.raises(ValueError, match="declined"):
        config_of(op, *problem, H200)


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        ((9, 12, 4, 8), "multiple of 8"),
        ((9, 16, 4, 12), "multiple of 8"),
        ((9, 16, 0, 8), "without features"),
        ((9, 0, 4, 8), "no hidden features"),
        ((9, 8, 4, 0), "no out features"),
    ],
)
def test_mlp_declines_with_a_reason(problem: tuple[int, ...], word: str) -> None:
    assert word in _host.gated_mlp_decline_reason(*problem, H200)
    with pytest.raises(ValueError, match="declined"):
        _host.gated_mlp_config(*problem, H200)


def test_few_features_have_a_kernel_of_their_own() -> None:
    for M, N, narrow in ((9, 1, True), (9, 7, True), (9, 8, False), (99, 8, True), (99, 16, False)):
        config = _host.linear_act_config(M, N, 256, H200)
        assert (config.product is None) == narrow
    config = json.loads(repr(_host.gated_mlp_config(2000, 256, 512, 1, H200)))
    assert config["down"] == {"kernel": "narrow_sm90"}
    assert "multiple of 8" in reason_of("gated_linear", 9, 1, 256, H200)
    assert "multiple of 8" in reason_of("linear_act", 9, 9, 256, H200)


def test_configs_print_as_json() -> None:
    linear = json.loads(repr(_host.linear_act_config(5000, 512, 512, H200)))
    assert (linear["kernel"], linear["launches"]) == ("linear_act_sm90", 1)
    assert linear["packed_weights"] == 0 and linear["product"]["kernel"] in KERNELS
    gated = json.loads(repr(_host.gated_linear_config(5000, 512, 512, H200)))
    assert (gated["kernel"], gated["launches"]) == ("gated_linear_sm90", 1)
    assert gated["product"]["kernel"] in KERNELS
    mlp = json.loads(repr(_host.gated_mlp_config(5000, 512, 512, 256, H200)))
    assert (mlp["kernel"], mlp["launches"], mlp["packed_weights"]) == ("gated_mlp_sm90", 2, 0)
    assert mlp["hidden"]["kernel"] in KERNELS and mlp["down"]["k_steps"] == 8


# ---- backward ----------------------------------------------------------------------------------
@given(
    M=sizes, N=st.integers(1, 9000), K=st.integers(1, 4000), out=st.integers(0, 9000),
    wants_input=st.booleans(), device=st.sampled_from(DEVICES),
)  # fmt: skip
def test_every_backward_has_a_config(
    M: int, N: int, K: int, out: int, wants_input: bool, device: object
) -> None:
    config = _host.gated_grad_config(M, N, K, out, wants_input, device)
    # Pairs of CTAs need two SMs.
    assert (config.hidden is not None) == (
        out > 0 and out % 8 == 0 and N % 8 == 0 and device.sm_count > 1
    )
    if config.hidden:
        assert repr(config.hidden.kernel) == "gemm_sm90_128x128x64_ping_pong_cluster2"
        assert config.hidden.k_steps == -(-out // 64)
        assert config.hidden.grid <= device.sm_count
    assert (config.input is not None) == (wants_input and N % 8 == 0 and K % 8 == 0)
    if config.input:
        assert config.input.k_steps == -(-N // 64)  # of one of the two terms
        assert config.input.n_tiles == -(-K // config.input.kernel.tile_n)
        assert config.input.grid <= device.sm_count


def test_what_the_backward_leaves_to_the_library() -> None:
    large = _host.gated_grad_config(9, 16, 2**31, 8, True, H200)
    assert large.hidden is not None and large.input is None
    for problem in ((9, 0, 8, 8), (9, 8, 0, 8)):
        with pytest.raises(ValueError, match="declined"):
            _host.gated_grad_config(*problem, True, H200)


def test_backward_prints_as_json() -> None:
    config = json.loads(repr(_host.gated_grad_config(500, 512, 256, 264, True, H200)))
    assert (config["kernel"], config["packed_weights"]) == ("gated_mlp_grad_sm90", 0)
    assert config["hidden"]["k_steps"] == 5 and config["input"]["k_steps"] == 8
    config = json.loads(repr(_host.gated_grad_config(500, 512, 256, 0, False, H200)))
    assert config == {
        "kernel": "gated_grad_sm90", "packed_weights": 0, "hidden": None, "input": None,
    }  # fmt: skip
