"""`import ikbo`: no GPU, no environment, no output; and an error that says what is wrong."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import shutil
import subprocess

import pytest

import ikbo

from .installed import LIBRARY, PACKAGE, REPOSITORY, run_python, undefined_symbols

# Runs before `import ikbo`: notes each variable that a module of ikbo reads through os.environ.
WATCH_ENVIRONMENT = """
import os, sys, torch
read = []
def watched(original):
    def wrapper(self, key, *rest):
        frame = sys._getframe(1)
        while frame and frame.f_globals.get("__name__") in ("os", "_collections_abc"):
            frame = frame.f_back
        if frame and frame.f_globals.get("__name__", "").startswith("ikbo"):
            read.append(key)
        return original(self, key, *rest)
    return wrapper
for name in ("__getitem__", "__contains__"):
    setattr(os._Environ, name, watched(getattr(os._Environ, name)))
import ikbo
print(read)
"""


def _documented_variables() -> set[str]:
    section = (REPOSITORY / "README.md").read_text().split("## Environment variables")[1]
    table = section.split("\n## ")[0]
    return {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}


def test_prints_nothing_and_warns_of_nothing() -> None:
    done = run_python("import ikbo", env=os.environ | {"PYTHONWARNINGS": "error::UserWarning:ikbo"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_python_reads_no_undocumented_environment() -> None:
    done = run_python(WATCH_ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert set(eval(done.stdout)) <= _documented_variables()


def test_library_reads_no_environment(tmp_path: pathlib.Path) -> None:
    """The CUDA runtime inside it reads CUDA_* when a GPU is first used, not on import."""
    spy = tmp_path / "getenv_log.so"
    source = REPOSITORY / "tests/cpp/getenv_log.cpp"
    subprocess.run(["c++", "-shared", "-fPIC", source, "-o", spy, "-ldl"], check=True)
    assert "getenv" in undefined_symbols(LIBRARY), "the test would see nothing"
    done = run_python("import ikbo", env=os.environ | {"LD_PRELOAD": str(spy)})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_touches_no_gpu(device: str) -> None:
    """Meaningful on the GPU machine; elsewhere it shows at least that no driver is loaded."""
    done = run_python(
        "import os, pathlib, torch\n"
        "def open_devices():\n"
        "    links = [f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd')]\n"
        "    return [os.readlink(l) for l in links if os.path.lexists(l)]\n"
        "def driver_is_loaded():\n"
        "    return 'libcuda.so' in pathlib.Path('/proc/self/maps').read_text()\n"
        "loaded_by_torch = driver_is_loaded()\n"
        "import ikbo\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not [d for d in open_devices() if d.startswith('/dev/nvidia')]\n"
        "assert driver_is_loaded() == loaded_by_torch\n"
    )
    assert done.returncode == 0, done.stderr


def test_version_is_the_same_everywhere() -> None:
    assert ikbo.__version__ == importlib.metadata.version("ikbo")


def test_public_names_exist_and_are_documented() -> None:
    for name in ikbo.__all__:
        assert getattr(ikbo, name).__doc__, name


def _copy(tmp_path: pathlib.Path) -> pathlib.Path:
    shutil.copytree(PACKAGE, tmp_path / "ikbo", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "ikbo"


def test_missing_library_is_named(tmp_path: pathlib.Path) -> None:
    library = _copy(tmp_path) / "libikbo.so"
    library.unlink()
    done = run_python("import ikbo", cwd=tmp_path)
    assert f"ImportError: ikbo expects its op library at {library}" in done.stderr
    assert "make wheel" in done.stderr


def test_broken_library_is_named(tmp_path: pathlib.Path) -> None:
    library = _copy(tmp_path) / "libikbo.so"
    library.write_bytes(b"not a library")
    done = run_python("import ikbo", cwd=tmp_path)
    assert f"ImportError: ikbo couldn't load {library}" in done.stderr
    assert "python -m ikbo.collect_env" in done.stderr


def test_old_torch_is_named(tmp_path: pathlib.Path) -> None:
    _copy(tmp_path)
    done = run_python("import torch; torch.__version__ = '2.10.1+cu130'; import ikbo", cwd=tmp_path)
    assert "ImportError: ikbo expects torch >= 2.11, got 2.10.1+cu130" in done.stderr


def test_host_module_needs_no_torch(tmp_path: pathlib.Path) -> None:
    """ikbo._host serves tools that have no torch: its file loads by itself."""
    _copy(tmp_path)
    done = run_python(
        "import sys; sys.path.insert(0, 'ikbo'); import _host\n"
        "assert 'torch' not in sys.modules; print(_host.group_candidates_config(10, 3).passes)",
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "1", done.stderr


def test_torch_loads_the_library_by_itself() -> None:
    """What a program without ikbo's Python does."""
    done = run_python(
        f"import torch; torch.ops.load_library({str(LIBRARY)!r})\n"
        "print(torch.ops.ikbo.group_candidates(torch.tensor([0, 0]), 1)[1].tolist())"
    )
    assert done.stdout.strip() == "[0, 2]", done.stderr
