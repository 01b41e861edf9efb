"""The gating GEMM on every kernel of the table, those that no configuration chooses included.
Kernels in tests/device/gated.cu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ikbo.testing import assert_matches_definition, definitions

from .test_device import Call, call  # noqa: F401  (the fixture)
from .test_gated_gpu import draw

pytestmark = pytest.mark.gpu

# Of kGemmKernels in csrc/config/gemm.h, those whose half a tile is whole pieces of 64 columns; -1
# is the config's choice.
KERNELS = range(7)
GUARD = 8  # rows of NaN around the outputs
SHAPES = [
    (1, 8, 8), (63, 64, 64), (65, 72, 136), (128, 128, 64), (129, 136, 1024), (257, 1032, 192),
    (433, 256, 872), (1000, 1000, 1000), (2049, 264, 520), (4096, 1160, 128),
]  # fmt: skip


def amid_nan(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    buffer = torch.full((rows + 2 * GUARD, columns), float("nan"), device="cuda")
    buffer = buffer.bfloat16()
    return buffer, buffer[GUARD : GUARD + rows]


def copies_amid_nan(results: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """What was written into places of amid_nan(), and nothing outside them."""
    copies = [inside.clone() for _, inside in results]
    for buffer, inside in results:
        inside.fill_(float("nan"))
        assert bool(buffer.isnan().all())
    return copies


def gated(call: Call, args: list[Any], kernel: int, *, saves: bool) -> list[Tensor]:  # noqa: F811
    """out, gate and up; checks that nothing outside them was written."""
    x, w_gate, w_up, b_gate, b_up = args
    M, N = x.shape[0], w_gate.shape[0]
    results = [amid_nan(M, N) for _ in range(3 if saves else 1)]
    preacts = [inside for _, inside in results[1:]] if saves else [None, None]
    properties = torch.cuda.get_device_properties(0)
    call(
        "gated", x, w_gate, w_up, b_gate, b_up, results[0][1], *preacts, M, N, x.shape[1], kernel,
        properties.multi_processor_count, properties.L2_cache_size,
    )  # fmt: skip
    return copies_amid_nan(results)


def inputs(M: int, N: int, K: int, *, bias: bool = True) -> list[Any]:
    t = draw(torch.bfloat16, seed=0)
    weights = [t(N, K, scale=K**-0.5) for _ in range(2)]
    return [t(M, K), *weights, *((t(N), t(N)) if bias else (None, None))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", [-1, *KERNELS])
def test_matches_the_definition(
    call: Call,  # noqa: F811
    kernel: int,
    shape: tuple[int, int, int],
) -> None:
    for bias in (False, True):
        args = inputs(*shape, bias=bias)
        wide = [a if a is None else a.double() for a in args]
        out, gate, up = gated(call, args, kernel, saves=True)
        exact = definitions.gated_linear(*wide, "gelu_tanh")
        assert_matches_definition(out, exact, definitions.gated_linear(*args, "gelu_tanh"))
        for got, w, b in ((gate, 1, 3), (up, 2, 4)):
            exact = definitions.linear_act(wide[0], wide[w], wide[b], "none")
            plain = definitions.linear_act(args[0], args[w], args[b], "none")
            assert_matches_definition(got, exact, plain)
        assert torch.equal(gated(call, args, kernel, saves=False)[0], out)


@pytest.mark.parametrize("kernel", KERNELS)
def test_repeats_give_the_same_bits(call: Call, kernel: int) -> None:  # noqa: F811
    args = inputs(1500, 1200, 640)
    first = gated(call, args, kernel, saves=True)
    for _ in range(20):
        again = gated(call, args, kernel, saves=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
