"""What the GPU reaches at best: copies and matrix products by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cases import Maker
from .timing import Timer

MIN_COPY_TBPS = 4.2  # under it something else uses the card, or it is throttled


def copy_TBps(timer: Timer, device: torch.device, size: int = 1 << 32) -> float:
    """Bytes read and written by a copy of ``size`` bytes, in TB/s."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timer.events(lambda: target.copy_(source), 20)() / 1e6


def matmul_TFLOPS(timer: Timer, device: torch.device, n: int = 8192) -> float:
    """bf16 rate of an n x n x n product of random data."""
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * n**3 / timer.events(lambda: a @ b, 40)() / 1e6


def same_size_copies(moved_bytes: int) -> list[Maker]:
    """Makers of copies that read and write ``moved_bytes`` in all: by the driver, by kernels."""

    def maker(copy: Callable[[Tensor, Tensor], Any], dtype: torch.dtype) -> Maker:
        def make(inputs: Any) -> Callable[[], None]:
            count = -(-moved_bytes // 2 // dtype.itemsize)
            limit = torch.iinfo(dtype).max
            source = torch.randint(limit, (count,), dtype=dtype, device=inputs.x.device)
            target = torch.empty_like(source)

            def run() -> None:
                copy(source, target)

            return run

        return make

    def invert(source: Tensor, target: Tensor) -> Tensor:
        return torch.bitwise_not(source, out=target)

    return [
        maker(lambda source, target: target.copy_(source), torch.uint8),
        maker(invert, torch.int32),
        maker(invert, torch.int64),
    ]
