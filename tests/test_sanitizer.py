"""Every kernel under compute-sanitizer."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

from .sanitizer_workload import WORK


@pytest.mark.gpu_slow
@pytest.mark.parametrize("work", sorted({function.__name__ for function, _ in WORK}))
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_kernels_are_clean(tool: str, work: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    assert sanitizer, "compute-sanitizer is part of the CUDA toolkit and must be on PATH"
    workload = pathlib.Path(__file__).with_name("sanitizer_workload.py")
    run = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(workload), work],
        capture_output=True,
        text=True,
        timeout=480,
    )
    # The first finding is the one to look at, under the name of the work that was going on.
    assert run.returncode == 0, run.stdout[:4000] + run.stderr[-2000:]
