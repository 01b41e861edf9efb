"""Every kernel under compute-sanitizer."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest


@pytest.mark.gpu_slow
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_kernels_are_clean(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    assert sanitizer, "compute-sanitizer is part of the CUDA toolkit and must be on PATH"
    workload = pathlib.Path(__file__).with_name("sanitizer_workload.py")
    run = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(workload)],
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
