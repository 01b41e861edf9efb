"""What the kernels and the build cost, against the checked-in table tests/budget.json.

A kernel that needs more registers, shared memory or stack than its row fails, and so does one
without a row. After a change that is meant, `python -m tests.test_budget` rewrites the rows, and
the diff shows what it cost. The rows are of the nvcc in requirements/nvcc.txt.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from .installed import LIBRARY, REPOSITORY, cuobjdump

TABLE = REPOSITORY / "tests/budget.json"


def _kernels() -> dict[str, dict[str, int]]:
    """Registers a thread, static shared memory and stack in bytes of each kernel in the library."""
    report = subprocess.run(
        [cuobjdump(), "--dump-resource-usage", LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    names = re.findall(r"Function (\S+):", report)
    plain = subprocess.run(["c++filt", "-p", *names], capture_output=True, text=True, check=True)
    usage = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report)
    assert names
    assert len(names) == len(usage)
    return {
        name: {"registers": int(reg), "shared": int(shared), "stack": int(stack) + int(local)}
        for name, (reg, stack, shared, local) in sorted(
            zip(plain.stdout.splitlines(), usage, strict=True)
        )
    }


def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table


def test_every_kernel_keeps_to_its_row() -> None:
    rows, kernels = _table()["kernels"], _kernels()
    assert kernels.keys() == rows.keys(), "python -m tests.test_budget rewrites the rows"
    over = [
        f"{name}: {what} {now} > {rows[name][what]}"
        for name, uses in kernels.items()
        for what, now in uses.items()
        if now > rows[name][what]
    ]
    assert not over, over


def test_no_kernel_uses_the_stack() -> None:
    assert not [name for name, uses in _kernels().items() if uses["stack"]]


def test_library_keeps_to_its_size() -> None:
    size, budget = LIBRARY.stat().st_size, _table()["library_bytes"]
    assert size <= 1.05 * budget, f"{size} bytes; python -m tests.test_budget rewrites the table"


def test_build_keeps_to_its_time() -> None:
    """The compiler seconds in Ninja's log of the build that `make test` made, over 2 cores. Steps
    that were up to date stand there with the time they took when they ran."""
    # Builds around a prebuilt library (IKBO_LIBRARY) compile no ops.
    logs = [
        log
        for log in (REPOSITORY / "build").glob("temp.*/.ninja_log")
        if "registration.cpp" in log.read_text()
    ]
    if not logs:
        pytest.skip("no build log: run make wheel")
    newest = max(logs, key=lambda path: path.stat().st_mtime)
    steps: dict[str, int] = {}
    for line in newest.read_text().splitlines()[1:]:
        start, end, _, output, _ = line.split("\t")
        steps[output] = int(end) - int(start)
    seconds = sum(steps.values()) / 1000 / 2
    assert seconds < _table()["build_seconds"], sorted(steps.items(), key=lambda s: -s[1])[:10]


if __name__ == "__main__":
    table = _table() | {"library_bytes": LIBRARY.stat().st_size}
    rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in _kernels().items())
    del table["kernels"]
    TABLE.write_text(json.dumps(table, indent=1)[:-2] + f',\n "kernels": {{\n{rows}\n }}\n}}\n')
