"""Every kernel under compute-sanitizer."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

from . import racecheck
from .sanitizer_workload import names


def run(tool: str, work: str) -> subprocess.CompletedProcess[str]:
    sanitizer = shutil.which("compute-sanitizer")
    assert sanitizer, "compute-sanitizer is part of the CUDA toolkit and must be on PATH"
    workload = pathlib.Path(__file__).with_name("sanitizer_workload.py")
    # The norms' rings have more barriers, one to three a warp and stage, than synccheck keeps track
    # of by default; beyond that it stops the kernel.
    barriers = ["--num-cuda-barriers", "65536"] if tool == "synccheck" else []
    return subprocess.run(
        [sanitizer, "--tool", tool, *barriers, "--error-exitcode", "9", "--print-limit", "1000",
         sys.executable, str(workload), work],
        capture_output=True,
        text=True,
        timeout=480,
    )  # fmt: skip


@pytest.mark.gpu_slow
@pytest.mark.parametrize("work", names())
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_kernels_are_clean(tool: str, work: str) -> None:
    result = run(tool, work)
    # The first finding is the one to look at, under the name of the work that was going on.
    assert result.returncode == 0, result.stdout[:4000] + result.stderr[-2000:]


@pytest.mark.gpu_slow
@pytest.mark.parametrize("work", names())
def test_every_hazard_is_explained(work: str) -> None:
    result = run("racecheck", work)
    assert result.returncode in (0, 9) and "RACECHECK SUMMARY" in result.stdout, (
        result.stdout[-2000:] + result.stderr[-2000:]
    )
    found = racecheck.hazards(result.stdout)
    assert found <= racecheck.EXPLAINED.keys(), found - racecheck.EXPLAINED.keys()


def test_hazards_are_read_from_the_tool_s_output() -> None:
    output = """
========= Error: Race reported between Read access at ikbo::hopper::load_tiles(unsigned int (&)[4], const void *)+0x4ef0 in fragments.cuh:15
=========     and Write access at void ikbo::a::b<ikbo::c::Shape<half, (int)0>>(ikbo::c::Shared<T1> &)::[lambda() (instance 2)]::operator ()() const+0x3850 in b.cuh:200 [48 hazards]
========= Error: Race reported between Read access at nvjet_sm90_tst_32x64+0xb30
=========     and Write access at nvjet_sm90_tst_32x64+0x2fb0 [480 hazards]
"""  # noqa: E501
    assert racecheck.hazards(output) == {("ikbo::a::b", "ikbo::hopper::load_tiles")}
