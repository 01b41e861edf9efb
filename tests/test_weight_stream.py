"""The products of few tokens: every tile and split. Kernels in tests/device/weight_stream.cu."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ikbo.testing import assert_matches_definition, definitions

from .test_device import Call, call  # noqa: F401  (the fixture)
from .test_gated_tiles import amid_nan, copies_amid_nan, inputs

pytestmark = pytest.mark.gpu

SPLITS = [0, 1, 2, 4, 8]  # 0: as the config says
SHAPES = [
    (1, 8, 512), (2, 64, 520), (7, 72, 1000), (8, 136, 4096), (15, 1032, 640), (16, 264, 904),
    (17, 64, 2056), (24, 72, 712), (33, 520, 1544), (63, 136, 513), (64, 1160, 2048),
    (65, 72, 520), (127, 136, 1032), (130, 264, 1544), (500, 1032, 712),
]  # fmt: skip


def product(
    call: Call,  # noqa: F811
    args: list[Any],
    split: int,
    *,
    saves: bool,
    ctas_per_sm: int = 1,
    sms: int | None = None,
) -> list[torch.Tensor]:
    """out and the sums before the activation; checks that nothing outside them was written."""
    x, *weights = args
    M, N = x.shape[0], weights[0].shape[0]
    count = 2 if weights[1] is not None else 1
    results = [amid_nan(M, N) for _ in range(1 + count if saves else 1)]
    preacts = [inside for _, inside in results[1:]] + [None, None]
    properties = torch.cuda.get_device_properties(0)
    call(
        "weight_stream", x, *weights, results[0][1], *preacts[:2], M, N, x.shape[1], split,
        ctas_per_sm, sms or properties.multi_processor_count, properties.L2_cache_size,
    )  # fmt: skip
    return copies_amid_nan(results)


def wide(args: list[Any]) -> list[Any]:
    return [None if a is None else a.double() for a in args]


def padded(x: torch.Tensor) -> torch.Tensor:
    """K a multiple of 8, as the rows of contiguous operands have to be."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("weights", [1, 2])
def test_matches_the_definition(
    call: Call,  # noqa: F811
    weights: int,
    split: int,
    shape: tuple[int, int, int],
) -> None:
    for bias in (False, True):
        x, w0, w1, b0, b1 = inputs(*shape, bias=bias)
        x, w0, w1 = padded(x), padded(w0), padded(w1)
        if weights == 1:
            args, of = [x, w0, None, b0, None], [x, w0, b0]
            definition: Any = definitions.linear_act
        else:
            args = of = [x, w0, w1, b0, b1]
            definition = definitions.gated_linear
        out, *preacts = product(call, args, split, saves=True)
        exact = definition(*wide(of), "gelu_tanh")
        assert_matches_definition(out, exact, definition(*of, "gelu_tanh"))
        for got, w, b in zip(preacts, (w0, w1), (b0, b1), strict=False):
            exact = definitions.linear_act(*wide([x, w, b]), "none")
            assert_matches_definition(got, exact, definitions.linear_act(x, w, b, "none"))
        assert torch.equal(product(call, args, split, saves=False)[0], out)


@pytest.mark.parametrize("split", SPLITS[1:])
@pytest.mark.parametrize("weights", [1, 2])
def test_repeats_give_the_same_bits(call: Call, weights: int, split: int) -> None:  # noqa: F811
    for M in (16, 50, 200):
        args = inputs(M, 8200, 1032)
        if weights == 1:
            args[2] = args[4] = None
        first = product(call, args, split, saves=True)
        for _ in range(20):
            again = product(call, args, split, saves=True)
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("sms", [10, 11, 13, 16, 18])
@pytest.mark.parametrize("M", [16, 50, 130])
def test_tiles_of_fewer_features_change_no_bits(call: Call, M: int, sms: int) -> None:  # noqa: F811
    """1160 features: in tiles of as many as the kernel takes, and of 16 to that."""
    for weights in (1, 2):
        args = inputs(M, 1160, 1032)
        if weights == 1:
            args[2] = args[4] = None
        for split in (1, 2, 4):
            want = product(call, args, split, saves=True, sms=1)
            for ctas_per_sm in (1, 2):
                got = product(
                    call, args, split, saves=True, ctas_per_sm=ctas_per_sm,
                    sms=sms * split * -(-M // 64),
                )  # fmt: skip
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_token_is_the_same_among_others(call: Call) -> None:  # noqa: F811
    args = inputs(64, 264, 1032)
    want = product(call, args, 2, saves=False)[0]
    args[0][1::2] = float("nan")
    assert torch.equal(product(call, args, 2, saves=False)[0][::2], want[::2])
