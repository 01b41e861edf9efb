"""Kernels that are no op of ikbo, called in the library of the device tests: built by
cmake --build build/cmake --target ikbo_device_tests, looked for at
build/cmake/libikbo_device_tests.so, or where IKBO_DEVICE_TESTS says."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .cases import Maker

LIBRARY = Path(__file__).resolve().parents[1] / "build/cmake/libikbo_device_tests.so"
# Of tests/device/copy.cu.
COPY_FORMS = 5
COPY_ARGUMENTS = [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_int]


def function(name: str, argtypes: Sequence[Any]) -> Callable[..., None]:
    """ikbo_test_NAME of tests/device: enqueues on the current stream, which it takes last."""
    path = Path(os.environ.get("IKBO_DEVICE_TESTS", LIBRARY))
    if not path.exists():
        raise FileNotFoundError(
            f"expected ikbo_test_{name} in {path}: cmake --build build/cmake --target "
            "ikbo_device_tests, or set IKBO_DEVICE_TESTS"
        )
    found = getattr(ctypes.CDLL(str(path)), f"ikbo_test_{name}")
    found.restype = ctypes.c_char_p
    found.argtypes = [*argtypes, ctypes.c_void_p]

    def call(*arguments: Any) -> None:
        error = found(*arguments, torch.cuda.current_stream().cuda_stream)
        if error is not None:
            raise RuntimeError(error.decode())

    return call


def copies(moved_bytes: int, reads: int) -> list[Maker]:
    """Makers of copies that move as many bytes in all: the copy kernel in each of its forms, with
    one or two tensors read and one written."""

    def maker(form: int) -> Maker:
        def make(inputs: Any) -> Callable[[], None]:
            copy = function("copy", COPY_ARGUMENTS)
            part = -(-moved_bytes // (reads + 1) // 16) * 16
            buffers = [
                torch.randint(255, (part,), dtype=torch.uint8, device=inputs.x.device)
                for _ in range(reads + 1)
            ]
            a, to = buffers[0].data_ptr(), buffers[-1].data_ptr()
            b = buffers[1].data_ptr() if reads == 2 else None

            def run(kept: list[torch.Tensor] = buffers) -> None:
                copy(a, b, to, part, form)

            return run

        return make

    return [maker(form) for form in range(COPY_FORMS)]
