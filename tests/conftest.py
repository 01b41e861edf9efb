from __future__ import annotations

import datetime
import json
import os
import pathlib
import subprocess

import pytest
import torch

import ikbo  # noqa: F401  (registers the ops)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record",
        type=pathlib.Path,
        help="merge this run's counts into a JSON file, by tier (the -m expression) and files",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests need a Hopper GPU; without one they can't run, also when asked for by name."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return
    skip = pytest.mark.skip(reason="needs a Hopper GPU (compute capability 9.0)")
    for item in items:
        if "gpu" in item.keywords or "gpu_slow" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:  # type: ignore[no-untyped-def]
    path: pathlib.Path | None = config.getoption("record")
    if path is None:
        return
    tier = config.getoption("markexpr")
    runs = json.loads(path.read_text()) if path.exists() else []
    counts = {
        outcome: len(terminalreporter.stats.get(outcome, []))
        for outcome in ("passed", "failed", "skipped")
    }
    counts["failed"] += len(terminalreporter.stats.get("error", []))
    run: dict[str, object] = {
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "tier": tier,
        **counts,
    }
    if config.args != config.getini("testpaths"):
        run["of"] = config.args  # not all of the tier
    same = (tier, run.get("of"))
    runs = [other for other in runs if (other["tier"], other.get("of")) != same] + [run]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(runs, indent=1) + "\n")


def _commit() -> str:
    """HEAD, or IKBO_COMMIT where the tree was copied without its history."""
    if "IKBO_COMMIT" in os.environ:
        return os.environ["IKBO_COMMIT"]
    here = pathlib.Path(__file__).parent
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=here, text=True).strip()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
