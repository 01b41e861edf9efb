"""A wait for what never comes ends in an error, within a minute, and doesn't hang the GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .installed import REPOSITORY
from .test_device import LIBRARY

CODE = """
import time, torch
from tests import test_device
call = test_device.load()
start = time.time()
try:
    call("trap")
except RuntimeError as error:
    print(f"{time.time() - start:.2f} s, {error}")
"""


@pytest.mark.gpu_slow
def test_waits_are_bounded() -> None:
    """In a process of its own: a trap ends the CUDA context."""
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY} isn't built: cmake --build build/cmake --target ikbo_device_tests")
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True, text=True, timeout=120, cwd=REPOSITORY,
    )  # fmt: skip
    assert " s, " in run.stdout, run.stderr
    seconds = float(run.stdout.split(" s, ")[0])
    assert 1 < seconds < 60, run.stdout  # no less: other work may share the GPU
    assert "CUDA" in run.stdout
