"""`python -m ikbo.collect_env`: the report also comes when ikbo or torch is broken."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

import ikbo
from ikbo import collect_env

from .installed import LIBRARY, PACKAGE


def _run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ikbo.collect_env", *arguments],
        capture_output=True, text=True, timeout=300, **options,
    )  # fmt: skip


def _broken_copy(tmp_path: pathlib.Path, content: bytes) -> dict[str, Any]:
    shutil.copytree(PACKAGE, tmp_path / "ikbo", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ikbo" / "libikbo.so").write_bytes(content)
    done = _run("--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["ikbo_library"] == str(tmp_path / "ikbo" / "libikbo.so")
    return report


def test_json_report_of_a_good_installation() -> None:
    done = _run("--json", cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ikbo_loads"] is True
    assert report["ikbo_version"] == ikbo.__version__
    assert report["ikbo_library"] == str(LIBRARY)
    assert report["ikbo_library_bytes"] == LIBRARY.stat().st_size
    assert report["torch"] == torch.__version__
    assert report["torch_cuda"] == torch.version.cuda
    assert report["python"] == sys.version.split()[0]
    assert "glibc" in report["libc"]
    assert str(LIBRARY) in report["loaded_libraries"]
    assert "import_error" not in report


def test_report_from_within_python() -> None:
    report = collect_env.collect()
    assert report["ikbo_loads"] is True
    assert report["ikbo_installed"] == ikbo.__version__
    assert report["python_executable"] == sys.executable


def test_library_that_is_no_library_is_reported(tmp_path: pathlib.Path) -> None:
    report = _broken_copy(tmp_path, b"not a library")
    assert report["ikbo_loads"] is False
    assert "couldn't load" in report["import_error"]
    assert report["torch"] == torch.__version__


def test_library_that_kills_the_process_is_reported(tmp_path: pathlib.Path) -> None:
    """A truncated file is mapped past its end: the loader dies of SIGBUS."""
    report = _broken_copy(tmp_path, LIBRARY.read_bytes()[:4096])
    assert report["ikbo_loads"] is False
    assert report["import_error"] == "killed by SIGBUS"
    assert report["ikbo_library_bytes"] == 4096


def test_absent_torch_is_reported(tmp_path: pathlib.Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not here')")
    report = _broken_copy(tmp_path, LIBRARY.read_bytes())
    assert report["import_error"] == "ImportError: torch is not here"
    assert report["ikbo_loads"] is False
    assert "torch" not in report


def test_failing_probe_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_subprocess(*args: Any, **kwargs: Any) -> None:
        raise OSError("no processes left")

    def no_package(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(subprocess, "run", no_subprocess)
    monkeypatch.setattr(importlib.metadata, "version", no_package)
    report = collect_env.collect()
    assert report["ikbo_installed"] is None
    assert report["imports"] == "OSError: no processes left"
    assert report["python"] == sys.version.split()[0]


def test_tools_of_the_gpu_machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi and nvcc as they answer on a machine that has them."""
    for name, answer in (
        (
            "nvidia-smi",
            "NVIDIA H200, 9.0, 143771 MiB, 580.65\nNVIDIA H200, 9.0, 143771 MiB, 580.65",
        ),
        ("nvcc", "Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0"),
    ):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\ncat <<END\n{answer}\nEND\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert collect_env._gpus() == {
        "gpus": ["NVIDIA H200 (sm_90, 143771 MiB)"] * 2,
        "driver": "580.65",
    }
    assert collect_env._nvcc() == {"nvcc": f"{tmp_path}/nvcc: Build cuda_13.0.r13.0"}


def test_text_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "collect", lambda: {"a": None, "b": ["c", "d"], "e": []})
    collect_env.main([])
    assert capsys.readouterr().out == "a: none\nb:\n  c\n  d\ne:\n  none\n"
    collect_env.main(["--json"])
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": ["c", "d"], "e": []}
    with pytest.raises(SystemExit, match="usage"):
        collect_env.main(["--yaml"])
