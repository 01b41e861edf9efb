"""The include rules of csrc/: who may know whom, and which headers of torch exist for ikbo."""

from __future__ import annotations

import pathlib
import re

import pytest

from .installed import REPOSITORY

CSRC = REPOSITORY / "csrc"
SOURCES = [path for path in sorted(CSRC.rglob("*")) if path.suffix in {".cpp", ".h", ".cu", ".cuh"}]

# ops -> kernels (host entries) -> launch, hopper; config is a leaf for all.
MAY_INCLUDE = {
    "config": {"config"},
    "launch": {"launch", "config"},
    "hopper": {"hopper", "config"},
    "kernels": {"kernels", "hopper", "launch", "config"},
    "ops": {"ops", "kernels", "launch", "config"},
    "pybind": {"pybind", "config"},
}
TORCH_HEADERS = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")
# launch asks torch for its stream; below it no tensor and no torch exists.
KNOW_TORCH = {"ops", "launch"}


def _layer(path: pathlib.Path) -> str:
    return path.relative_to(CSRC).parts[0]


def _includes(path: pathlib.Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def _wrong_includes(path: pathlib.Path, includes: list[str]) -> list[str]:
    layer, wrong = _layer(path), []
    for include in includes:
        target = include.split("/")[0]
        if target in ("ATen", "c10", "caffe2", "torch"):
            if layer not in KNOW_TORCH or not include.startswith(TORCH_HEADERS):
                wrong.append(include)
        elif target in MAY_INCLUDE:
            # The op layer sees kernels through their host entries, never through device code.
            device_code = layer == "ops" and include.endswith(".cuh")
            if target not in MAY_INCLUDE[layer] or device_code:
                wrong.append(include)
        elif target.startswith("cuda") and layer in ("config", "pybind"):
            wrong.append(include)
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CSRC)))
def test_includes_go_one_way(path: pathlib.Path) -> None:
    assert not _wrong_includes(path, _includes(path))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CSRC)))
def test_file_is_readable_in_one_go(path: pathlib.Path) -> None:
    assert len(path.read_text().splitlines()) < 600


@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("ops/x.cpp", "ATen/ATen.h"),
        ("ops/x.cpp", "torch/extension.h"),
        ("ops/x.cpp", "kernels/x/x_sm90.cuh"),
        ("ops/x.cpp", "hopper/tma.cuh"),
        ("kernels/x/x.cu", "torch/csrc/stable/tensor.h"),
        ("kernels/x/x.cu", "ops/tensor.h"),
        ("launch/x.h", "kernels/x/x.h"),
        ("hopper/x.cuh", "launch/launch.h"),
        ("config/x.h", "cuda_runtime.h"),
        ("config/x.h", "launch/device.h"),
    ],
)
def test_rule_notices(file: str, include: str) -> None:
    assert _wrong_includes(CSRC / file, [include]) == [include]


def test_device_code_stays_below_the_op_layer() -> None:
    holders = {_layer(path) for path in SOURCES if "__global__" in path.read_text()}
    assert holders == {"kernels"}
