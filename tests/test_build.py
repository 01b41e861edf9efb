"""What can be missing from a build is named, with the way to get it. Configuring takes seconds; nothing
is compiled."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from .installed import LIBRARY, PACKAGE, REPOSITORY

pytest.importorskip("cmake", reason="needs requirements/build.txt")
pytest.importorskip("ninja", reason="needs requirements/build.txt")


def _configure(build: pathlib.Path, *options: str, **environment: str) -> str:
    """What CMake says, with line breaks taken out: it wraps messages."""
    import ninja

    done = subprocess.run(
        [sys.executable, "-m", "cmake", "-S", str(REPOSITORY), "-B", str(build), "-G", "Ninja",
         f"-DCMAKE_MAKE_PROGRAM={ninja.BIN_DIR}/ninja", f"-DPython_EXECUTABLE={sys.executable}",
         f"-DIKBO_OUTPUT_DIR={build}", *options],
        capture_output=True, text=True, timeout=120, env=os.environ | environment,
    )  # fmt: skip
    return f"{done.returncode}: {re.sub(r'\s+', ' ', done.stdout + done.stderr)}"


def test_missing_torch(tmp_path: pathlib.Path) -> None:
    said = _configure(tmp_path, f"-DIKBO_TORCH_DIR={tmp_path}", CUDACXX=sys.executable)
    assert f"ikbo: no torch >= 2.11 headers found (looked in '{tmp_path}')" in said
    assert "pip install -r requirements/build.txt" in said


def test_missing_nvcc(tmp_path: pathlib.Path) -> None:
    hidden = ["-DCMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH=OFF", "-DCMAKE_FIND_USE_CMAKE_PATH=OFF"]
    said = _configure(
        tmp_path, *hidden, "-DIKBO_NVCC=IKBO_NVCC-NOTFOUND", "-DIKBO_CUDA_PLACES="
    )  # fmt: skip
    assert "ikbo: no CUDA compiler found" in said
    assert "pip install -r requirements/nvcc.txt" in said
