"""The plain GEMM, every kernel of its table, against torch. Kernels in tests/device/gemm.cu."""

from __future__ import annotations

import pytest
import torch

from ikbo.testing import assert_matches_definition

from .test_device import Call, call  # noqa: F401  (the fixture)

pytestmark = pytest.mark.gpu

N_KERNELS = 7  # kGemmKernels in csrc/config/gemm.h
GUARD = 8  # rows and columns of NaN around the output
SHAPES = [
    (1, 8, 8), (63, 64, 64), (65, 72, 136), (128, 256, 64), (129, 264, 1024), (255, 128, 192),
    (433, 256, 872), (1000, 1000, 1000), (2049, 520, 2048), (4096, 2304, 256),
]  # fmt: skip


def gemm(call: Call, a: torch.Tensor, b: torch.Tensor, kernel: int) -> torch.Tensor:  # noqa: F811
    """a @ b.T into a poisoned buffer; checks that nothing outside the result was written."""
    M, N = a.shape[0], b.shape[0]
    buffer = torch.full((M + 2 * GUARD, N + 2 * GUARD), float("nan"), dtype=a.dtype, device="cuda")
    d = buffer[GUARD : GUARD + M, GUARD : GUARD + N]
    properties = torch.cuda.get_device_properties(0)
    call(
        "gemm", a, b, d, M, N, a.shape[1], a.stride(0), b.stride(0), d.stride(0),
        int(a.dtype == torch.bfloat16), kernel, properties.multi_processor_count,
        properties.L2_cache_size,
    )  # fmt: skip
    result = d.clone()
    d.fill_(float("nan"))
    assert bool(buffer.isnan().all())
    return result


def operand(rows: int, K: int, dtype: torch.dtype) -> torch.Tensor:
    """A view with a row stride that is not K."""
    wide = torch.randn(rows, (K + 7) // 8 * 8 + 16, dtype=torch.float32, device="cuda")
    return (wide / max(K, 1) ** 0.25).to(dtype)[:, :K]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", range(-1, N_KERNELS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matches_the_definition(
    call: Call,  # noqa: F811
    dtype: torch.dtype,
    kernel: int,
    shape: tuple[int, int, int],
) -> None:
    M, N, K = shape
    a, b = operand(M, K, dtype), operand(N, K, dtype)
    exact = a.double() @ b.double().T
    assert_matches_definition(gemm(call, a, b, kernel), exact, a @ b.T)


@pytest.mark.parametrize("kernel", range(N_KERNELS))
def test_odd_k_reads_no_further(call: Call, kernel: int) -> None:  # noqa: F811
    """Columns past K are NaN in memory; the loads' boxes reach over them."""
    a, b = (torch.full((200, 128), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in "ab")
    for t in (a, b):
        t[:, :77] = torch.randn(200, 77, device="cuda")
    a, b = a[:, :77], b[:, :77]
    assert_matches_definition(gemm(call, a, b, kernel), a.double() @ b.double().T, a @ b.T)


@pytest.mark.parametrize("kernel", range(N_KERNELS))
def test_repeats_give_the_same_bits(call: Call, kernel: int) -> None:  # noqa: F811
    a, b = operand(1500, 640, torch.bfloat16), operand(1200, 640, torch.bfloat16)
    first = gemm(call, a, b, kernel)
    for _ in range(50):
        assert torch.equal(gemm(call, a, b, kernel), first)
