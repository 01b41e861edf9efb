"""What can be missing from a build is named, with the way to get it. Nothing is compiled here."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from .installed import LIBRARY, REPOSITORY

pytest.importorskip("cmake", reason="needs requirements/build.txt")
ninja = pytest.importorskip("ninja", reason="needs requirements/build.txt")


def _said(command: list[object], **environment: str) -> str:
    """What a command that must fail says; CMake's line breaks are taken out."""
    hidden = {"CUDACXX", "CUDA_HOME"}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=120,
        env=inherited | environment, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode != 0
    return " ".join((done.stdout + done.stderr).split())


def _script(name: str, *options: str, **environment: str) -> str:
    return _said([sys.executable, "-m", "cmake", *options, "-P", f"cmake/{name}"], **environment)


def _configure(build: pathlib.Path, *options: str) -> str:
    """Configures without the library, so that neither nvcc nor torch is looked for."""
    return _said(
        [sys.executable, "-m", "cmake", "-S", ".", "-B", build, "-G", "Ninja",
         f"-DCMAKE_MAKE_PROGRAM={ninja.BIN_DIR}/ninja", f"-DPython_EXECUTABLE={sys.executable}",
         f"-DIKBO_LIBRARY={LIBRARY}", f"-DIKBO_OUTPUT_DIR={build}", *options]
    )  # fmt: skip


def _program(path: pathlib.Path, answer: object) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nprintf %s '{answer}'\n")
    path.chmod(0o755)
    return path


def test_no_nvcc(tmp_path: pathlib.Path) -> None:
    python = _program(tmp_path / "python", "")  # one without nvidia-cuda-nvcc
    everywhere = ";".join([*os.environ["PATH"].split(os.pathsep), "/usr/local/cuda/bin"])
    said = _script(
        "FindNvcc.cmake", f"-DPython_EXECUTABLE={python}", f"-DCMAKE_IGNORE_PATH={everywhere}"
    )
    assert "ikbo: no CUDA compiler found" in said
    assert "pip install -r requirements/nvcc.txt" in said


def test_nvcc_from_pypi_in_part(tmp_path: pathlib.Path) -> None:
    _program(tmp_path / "cu13/bin/nvcc", "release 13.0")
    python = _program(tmp_path / "python", tmp_path / "cu13")
    said = _script("FindNvcc.cmake", f"-DPython_EXECUTABLE={python}")
    assert f"ikbo: nvcc from PyPI lacks {tmp_path}/cu13/nvvm/bin/cicc" in said


@pytest.mark.parametrize("version", ["release 12.9, V12.9.86", "no version at all"])
def test_old_nvcc(tmp_path: pathlib.Path, version: str) -> None:
    nvcc = _program(tmp_path / "bin/nvcc", version)
    options = f"-DPython_EXECUTABLE={sys.executable}"
    for said in (
        _script("FindNvcc.cmake", options, CUDACXX=str(nvcc)),
        _script("FindNvcc.cmake", options, CUDA_HOME=str(tmp_path)),
    ):
        assert f"ikbo: expected nvcc 13.0 or newer, got {nvcc}" in said


def test_no_torch(tmp_path: pathlib.Path) -> None:
    said = _script("TorchStable.cmake", f"-DIKBO_TORCH_DIR={tmp_path}")
    assert f"ikbo: no torch >= 2.11 headers found (looked in '{tmp_path}')" in said
    assert "pip install -r requirements/build.txt" in said


def test_no_python_headers(tmp_path: pathlib.Path) -> None:
    said = _configure(tmp_path, "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON")
    assert f"ikbo: expected a Python with its C headers, got '{sys.executable}' without" in said


def test_no_pybind11(tmp_path: pathlib.Path) -> None:
    said = _configure(tmp_path, "-DCMAKE_DISABLE_FIND_PACKAGE_pybind11=ON")
    assert f"ikbo: no pybind11 found for {sys.executable}" in said


def test_no_prebuilt_library(tmp_path: pathlib.Path) -> None:
    said = _configure(tmp_path, "-DIKBO_LIBRARY=/nowhere/libikbo.so")
    assert "expected a built library in IKBO_LIBRARY, got '/nowhere/libikbo.so'" in said


def test_other_generator(tmp_path: pathlib.Path) -> None:
    said = _said([sys.executable, "-m", "cmake", "-S", ".", "-B", tmp_path, "-G", "Unix Makefiles"])
    assert "ikbo: expected the Ninja generator, got Unix Makefiles" in said


SERIALISED = "ptxas info : (C7511) wgmma.mma_async instructions are serialized due to a call"


@pytest.mark.parametrize(
    ("says", "status", "expected"),
    [("", 0, 0), ("a warning", 0, 0), (SERIALISED, 0, 1), ("an error", 3, 3)],
)
def test_launcher_fails_where_wgmma_is_serialised(
    tmp_path: pathlib.Path, says: str, status: int, expected: int
) -> None:
    nvcc = _program(tmp_path / "nvcc", says)
    nvcc.write_text(f"{nvcc.read_text()}\nexit {status}\n")
    launcher = REPOSITORY / "cmake/nvcc_launcher.sh"
    done = subprocess.run([launcher, nvcc], capture_output=True, text=True)
    assert done.returncode == expected
    assert says in done.stdout


def test_launcher_hides_the_build_directory(tmp_path: pathlib.Path) -> None:
    nvcc = _program(tmp_path / "nvcc", "")
    nvcc.write_text("#!/bin/sh\nprintf '%s|' \"$@\"\n")
    source = tmp_path / "csrc/a b.cu"
    done = subprocess.run(
        [REPOSITORY / "cmake/nvcc_launcher.sh", nvcc, "-c", source, "-o", "x.cu.o", "-DA=$B c"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == "-c|/proc/self/cwd/csrc/a b.cu|-o|x.cu.o|-DA=$B c|\n"


BUILD_EXT = """
import importlib.util, runpy, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {hidden} else find_spec(name, *rest)
sys.argv = ["setup.py", "build_ext", "--build-temp", {tmp!r}, "--build-lib", {tmp!r}]
runpy.run_path("setup.py", run_name="__main__")
"""


def test_no_build_tools(tmp_path: pathlib.Path) -> None:
    code = BUILD_EXT.format(hidden=["cmake", "ninja"], tmp=str(tmp_path))
    said = _said([sys.executable, "-c", code])
    assert f"ikbo: the build needs cmake, ninja for {sys.executable}" in said


def test_no_cpp_compiler(tmp_path: pathlib.Path) -> None:
    code = BUILD_EXT.format(hidden=[], tmp=str(tmp_path))
    assert "ikbo: no C++ compiler found (looked for c++, g++, clang++)" in _said(
        [sys.executable, "-c", code], PATH=str(tmp_path)
    )
    assert "no C++ compiler found (looked for no-such-compiler)" in _said(
        [sys.executable, "-c", code], CXX="no-such-compiler"
    )
