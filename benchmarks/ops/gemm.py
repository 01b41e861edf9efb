"""The plain GEMM that the matrix kernels stand on, against cuBLAS. No op of ikbo: device_tests.py
says where it is called."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..cases import Case, Draw
from ..device_tests import function

NOTE = (
    "`A @ B.T` by the main loop that the matrix kernels stand on; not an op of ikbo. Both write "
    "into a tensor that is there already."
)
CHOSEN_BY_CONFIG = -1


def cases(scaled: Callable[[int], int]) -> list[Case]:
    def case(M: int, N: int, K: int) -> Case:
        # The kernel takes rows whose length is a multiple of 8; 768 / 64 isn't.
        m, n, k = (-(-scaled(size) // 8) * 8 for size in (M, N, K))

        def inputs(draw: Draw) -> SimpleNamespace:
            return SimpleNamespace(a=draw.randn(m, k), b=draw.randn(n, k))

        return Case(f"{M}x{N}x{K}", inputs, {"ikbo": _ikbo, "cublas": _cublas})

    return [
        case(8192, 8192, 8192),
        case(4096, 4096, 4096),
        case(8192, 3072, 768),
        case(8192, 768, 3072),
    ]


def _out(i: Any) -> Tensor:
    result: Tensor = i.a.new_empty(i.a.shape[0], i.b.shape[0])
    return result


def _ikbo(i: Any) -> Callable[[], Tensor]:
    argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 6 + [ctypes.c_int] * 3 + [ctypes.c_int64]
    gemm, d, (M, K), N = function("gemm", argtypes), _out(i), i.a.shape, i.b.shape[0]
    properties = torch.cuda.get_device_properties(d.device)
    numbers = (
        M, N, K, i.a.stride(0), i.b.stride(0), d.stride(0), d.dtype == torch.bfloat16,
        CHOSEN_BY_CONFIG, properties.multi_processor_count, properties.L2_cache_size,
    )  # fmt: skip

    def run() -> Tensor:
        gemm(i.a.data_ptr(), i.b.data_ptr(), d.data_ptr(), *numbers)
        return d

    return run


def _cublas(i: Any) -> Callable[[], Tensor]:
    d = _out(i)
    return lambda: torch.mm(i.a, i.b.T, out=d)
