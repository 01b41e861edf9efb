"""Times every op against its yardsticks; writes OP.json per op, after every case.

  python benchmarks/run.py [--op NAME ...] [--out DIR] [--quick]

Needs a Hopper GPU, and ikbo installed (or PYTHONPATH=python after a build in place). A run that
was cut short goes on where it stopped when it is started again at the same commit. The commit is
that of the environment variable IKBO_COMMIT, for a tree without its history, or the checkout's.

OP.json: {"meta": {gpu, torch, cuda, driver, commit, date, copy_TBps, matmul_TFLOPS, counts, quick},
"rows": [{case, dtype, impl, us, samples, timing, ratio, relerr}, ...]}. us is the median of
samples, one a round, all in microseconds; ratio is the median over rounds of this implementation's
time over ikbo's: above 1, ikbo is faster. timing is "graph" or "events" (timing.py says when).
relerr compares the result with ikbo's. A row with "error" has no times. A run counts if copy_TBps
is at least 4.2.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import ceilings, ops
from benchmarks.record import Record
from benchmarks.timing import ROUNDS, CudaTimer, Row, Timer, measure

ROOT = Path(__file__).resolve().parents[1]
QUICK_ROUNDS, QUICK_CASES = 3, 4


def main() -> None:
    arguments = _parse()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    device = _hopper()
    commit = _commit()
    timer = CudaTimer()
    meta = _meta(timer, device, commit) | {"quick": arguments.quick}
    print(f"{meta['gpu']}, {meta['copy_TBps']} TB/s copy, {meta['matmul_TFLOPS']} TFLOP/s bf16")
    if not meta["counts"]:
        print(f"copy_TBps is under {ceilings.MIN_COPY_TBPS}: this run doesn't count.")
    results = ROOT / ("build/benchmarks" if arguments.quick else "benchmarks/results")
    out = arguments.out or results / meta["gpu"].removeprefix("NVIDIA ").lower().replace(" ", "-")

    records = {op: Record(out / f"{op}.json", meta) for op in arguments.op or ops.OPS}
    work = []
    for op in records:
        each = [(op, case, dtype) for case in ops.cases(op) for dtype in case.dtypes]
        work += each[:QUICK_CASES] if arguments.quick else each
    work.sort(key=lambda w: w[2] == "fp16")  # the bars are on bf16: those first
    work = [(op, case, d) for op, case, d in work if not records[op].has(case.name, d)]
    for done, (op, case, dtype) in enumerate(work, 1):
        start = time.perf_counter()
        rows = measure(case, dtype, device, timer, QUICK_ROUNDS if arguments.quick else ROUNDS)
        records[op].add(rows)
        seconds = time.perf_counter() - start
        print(f"[{done}/{len(work)}] {op} {case.name} {dtype}: {summary(rows)} ({seconds:.1f} s)")
        _restart_if_lost(rows)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"done: {out}")


def summary(rows: list[Row]) -> str:
    """One line: ikbo's time, and how often as long the others take."""
    parts = []
    for row in rows:
        if "error" in row:
            parts.append(f"{row['impl']} {row['error']}")
        elif "ratio" in row:
            parts.append(f"{row['impl']} {row['ratio']:.3g}x")
        else:
            parts.append(f"{row['impl']} {row['us']:.4g} us")
    return ", ".join(parts)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--op",
        nargs="+",
        action="extend",
        choices=ops.OPS,
        metavar="NAME",
        help=f"of {', '.join(ops.OPS)}; by default all",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="by default benchmarks/results/GPU, or build/benchmarks/GPU if quick",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a first look, not for the record: few cases and rounds",
    )
    return parser.parse_args()


def _hopper() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
        raise SystemExit(
            f"benchmarks/run.py: expected a Hopper GPU (compute capability 9.0), found {found}. "
            "Times from elsewhere are no evidence; tests/test_benchmarks.py runs without a GPU."
        )
    return torch.device("cuda", torch.cuda.current_device())


def _commit() -> str:
    if commit := os.environ.get("IKBO_COMMIT"):
        return commit
    if (ROOT / ".git").exists():
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if git.returncode == 0:
            return git.stdout.strip()
    raise SystemExit(
        "benchmarks/run.py: expected a git checkout or IKBO_COMMIT, got neither. Set IKBO_COMMIT "
        "to the output of `git rev-parse HEAD` where the sources came from."
    )


def _meta(timer: Timer, device: torch.device, commit: str) -> dict[str, Any]:
    copy = ceilings.copy_TBps(timer, device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "copy_TBps": round(copy, 3),
        "matmul_TFLOPS": round(ceilings.matmul_TFLOPS(timer, device), 1),
        "counts": copy >= ceilings.MIN_COPY_TBPS,
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _restart_if_lost(rows: list[Row]) -> None:
    """After a fault the process has lost its GPU; a new one goes on with the next case."""
    if any("error" in row for row in rows):
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"starting again: {error}")
            os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    main()
