"""How products of few tokens are split (ikbo._host), over problems and devices."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikbo import _host

from .test_gemm_config import DEVICES, H200, SHARED_BYTES

OPS = ["linear_act", "gated_linear"]


def config_of(op: str, *problem: object) -> object:
    return getattr(_host, f"{op}_config")(*problem).product


@pytest.mark.parametrize("op", OPS)
@given(
    M=st.integers(1, 64), N=st.integers(1, 40000), K=st.integers(1, 40000),
    device=st.sampled_from(DEVICES),
)  # fmt: skip
def test_every_product_of_few_tokens(op: str, M: int, N: int, K: int, device: object) -> None:
    config = config_of(op, M, 8 * N, K, device)
    weights = 2 if op == "gated_linear" else 1
    assert config.weights == weights
    assert config.tokens == (16 if M <= 16 else 64)
    assert config.tiles == -(-8 * N // config.features)
    most = 128 // weights
    assert 16 <= config.features <= most and config.features % 4 == 0
    # Fewer than the kernel takes only where all CTAs, or all of each wave, find room at once.
    if config.features < most:
        waves = -(-(-(-8 * N // most) * config.split) // (2 * device.sm_count))
        assert config.ctas <= (waves + 1) * 2 * device.sm_count
    assert config.k_steps == -(-K // (128 if M <= 16 else 64))
    # Each CTA of a cluster has a step of K, and a cluster fits the device.
    assert config.split in (1, 2, 4, 8)
    assert config.split <= min(config.k_steps, device.sm_count)
    assert config.token_tiles == 1 and config.ctas == config.tiles * config.split
    assert config.weights_stay == (4 * weights * 8 * N * K <= device.l2_bytes)


def test_more_tokens_go_to_the_gemm_unless_it_leaves_sms_idle() -> None:
    config = config_of("linear_act", 512, 1024, 4096, H200)
    assert (config.tokens, config.tiles, config.token_tiles, config.ctas) == (64, 8, 8, 128)
    assert isinstance(config_of("linear_act", 2048, 4096, 4096, H200), _host.GemmConfig)
    assert isinstance(config_of("linear_act", 8192, 64, 64, H200), _host.GemmConfig)


@pytest.mark.parametrize(
    ("op", "problem", "split"),
    [
        ("gated_linear", (64, 11008, 4096), 1),
        ("gated_linear", (1, 11008, 4096), 1),
        ("linear_act", (64, 4096, 11008), 4),  # 57 tiles: 62 clusters of four find room
        ("linear_act", (1, 4096, 11008), 4),
        ("linear_act", (1, 64, 16384), 8),  # one tile: as many CTAs as may be
        ("linear_act", (64, 128256, 4096), 1),
        ("linear_act", (16, 512, 64), 1),
    ],
    ids=str,
)
def test_splits_of_interest(op: str, problem: tuple[int, int, int], split: int) -> None:
    assert config_of(op, *problem, H200).split == split


def test_the_estimate_of_a_long_product_is_its_weights_way() -> None:
    config = config_of("gated_linear", 64, 11008, 4096, H200)
    assert 1 < config.clocks / (2 * 2 * 11008 * 4096 / 2500) < 1.15


def test_declines_with_a_reason() -> None:
    small = _host.DeviceLimits(132, 50 * 2**20, SHARED_BYTES // 4)
    for op in OPS:
        reason = getattr(_host, f"{op}_decline_reason")
        assert "2^31" in reason(9, 2**31, 64, H200)
        assert "2^31" in reason(9, 64, 2**31, H200)
        assert "shared memory" in reason(9, 64, 64, small)
        assert reason(0, 64, 64, H200) is None
        assert reason(9, 0, 64, H200) is None


def test_prints_as_json() -> None:
    config = config_of("gated_linear", 7, 11008, 4096, H200)
    shown = json.loads(repr(config))
    assert shown["kernel"] == "weight_stream_sm90_128x16x128"
    assert (shown["weights"], shown["split_k"], shown["grid"]) == (2, 1, 251)
    assert shown["features"] == 44
    assert (shown["k_steps"], shown["weights_stay_in_l2"]) == (32, False)
