"""What a bug report needs: ``python -m ikbo.collect_env [--json]``.

Needs the standard library alone. Each probe may fail and then says why; torch and ikbo are imported
in another process, so that the report also comes when they crash.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
from typing import Any

# Prints a JSON object a line as it gets on, so that what precedes a crash is known.
_IMPORTS = """
import json, pathlib
def say(**facts): print(json.dumps(facts), flush=True)
import torch
say(torch=torch.__version__, torch_cuda=torch.version.cuda)
import ikbo
say(ikbo_loads=True, ikbo_version=ikbo.__version__)
if torch.cuda.is_available():
    torch.cuda.init()
names = ("libcuda", "libnv", "libcu", "libtorch", "libc10", "libikbo")
paths = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
say(loaded_libraries=sorted(p for p in paths if pathlib.Path(p).name.startswith(names)))
"""


def collect() -> dict[str, Any]:
    """The report: a flat dictionary of JSON values."""
    report: dict[str, Any] = {}
    for probe in (_ikbo, _imports, _system, _nvcc, _gpus):
        try:
            report |= probe()
        except Exception as error:  # a report with holes beats none
            report[probe.__name__.strip("_")] = f"{type(error).__name__}: {error}"
    return report


def _ikbo() -> dict[str, Any]:
    library = pathlib.Path(__file__).with_name("libikbo.so")
    try:
        installed: str | None = importlib.metadata.version("ikbo")
    except importlib.metadata.PackageNotFoundError:
        installed = None
    return {
        "ikbo_installed": installed,
        "ikbo_library": str(library),
        "ikbo_library_bytes": library.stat().st_size if library.exists() else None,
        "ikbo_host_module": importlib.util.find_spec("ikbo._host") is not None,
        "ikbo_loads": False,
    }


def _imports() -> dict[str, Any]:
    """Imports torch and ikbo as they are found from here."""
    package_dir = str(pathlib.Path(__file__).parent.parent)
    code = f"import sys; sys.path.insert(0, {package_dir!r})\n{_IMPORTS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    facts: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        facts |= json.loads(line)
    if done.returncode < 0:
        facts["import_error"] = f"killed by {signal.Signals(-done.returncode).name}"
    elif done.returncode:
        facts["import_error"] = done.stderr.strip().splitlines()[-1]
    return facts


def _system() -> dict[str, Any]:
    return {
        "python": sys.version.split()[0],
        "python_executable": sys.executable,
        "os": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
    }


def _nvcc() -> dict[str, Any]:
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return {"nvcc": f"{path}: {_last_line([path, '--version'])}" if path else None}


def _gpus() -> dict[str, Any]:
    if shutil.which("nvidia-smi") is None:
        return {"gpus": [], "driver": None}
    fields = "name,compute_cap,memory.total,driver_version"
    table = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    return {
        "gpus": [f"{name} (sm_{cc.replace('.', '')}, {memory})" for name, cc, memory, _ in rows],
        "driver": rows[0][-1] if rows else None,
    }


def _output(command: list[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


def _last_line(command: list[str]) -> str:
    return _output(command).splitlines()[-1]


def format_text(report: dict[str, Any]) -> str:
    """One fact a line; lists with an entry a line."""
    lines = []
    for key, value in report.items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"  {entry}" for entry in value or ["none"])]
        else:
            lines.append(f"{key}: {'none' if value is None else value}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Prints the report."""
    given = sys.argv[1:] if arguments is None else arguments
    if set(given) - {"--json"}:
        sys.exit("usage: python -m ikbo.collect_env [--json]")
    report = collect()
    print(json.dumps(report, indent=2) if "--json" in given else format_text(report))


if __name__ == "__main__":
    main()
