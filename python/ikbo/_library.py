"""Finds and loads libikbo.so, the op library."""

from __future__ import annotations

import ctypes
import functools
import pathlib

import torch

OLDEST_TORCH = (2, 11)
_PATH = pathlib.Path(__file__).with_name("libikbo.so")


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library: its ops registered with torch, its C functions ready to call.

    Raises:
        ImportError: torch is too old, or the library is missing or doesn't load.
    """
    if _torch_version() < OLDEST_TORCH:
        raise ImportError(
            f"ikbo expects torch >= {'.'.join(map(str, OLDEST_TORCH))}, got {torch.__version__}. "
            "Upgrade it with: pip install --upgrade torch"
        )
    if not _PATH.exists():
        raise ImportError(
            f"ikbo expects its op library at {_PATH}, and there is none. Install the wheel "
            "(make wheel, then pip install dist/*.whl), or build in place with cmake."
        )
    try:
        torch.ops.load_library(str(_PATH))
    except OSError as error:
        raise ImportError(
            f"ikbo couldn't load {_PATH}: {error}. Run: python -m ikbo.collect_env"
        ) from error
    c = ctypes.CDLL(str(_PATH))
    c.ikbo_version.restype = ctypes.c_char_p
    c.ikbo_warmup.restype = ctypes.c_char_p
    c.ikbo_warmup.argtypes = [ctypes.c_int]
    c.ikbo_explain.restype = ctypes.c_char_p
    c.ikbo_explain.argtypes = [ctypes.c_char_p]
    c.ikbo_counters.restype = ctypes.c_char_p
    c.ikbo_counters_reset.restype = None
    c.ikbo_set_strict.restype = None
    c.ikbo_set_strict.argtypes = [ctypes.c_int]
    c.ikbo_set_sm_limit.restype = None
    c.ikbo_set_sm_limit.argtypes = [ctypes.c_int]
    c.ikbo_sm_limit.restype = ctypes.c_int
    return c
