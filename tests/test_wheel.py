"""What a wheel of ikbo may and may not be: its links, symbols, paths, size and tag."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import sysconfig
import zipfile

import pytest
import torch

from .installed import (
    LIBRARY,
    PACKAGE,
    REPOSITORY,
    cuobjdump,
    exported_symbols,
    has_run_path,
    needed_libraries,
    run_python,
    undefined_symbols,
)

HOST = PACKAGE / f"_host{sysconfig.get_config_var('EXT_SUFFIX')}"
C_RUNTIME = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
STREAM_GETTER = "aoti_torch_get_current_cuda_stream"


def _wheel() -> pathlib.Path:
    """The wheel that `make test` installed."""
    found = list(
        (REPOSITORY / "dist").glob(f"ikbo-*-cp{sys.version_info[0]}{sys.version_info[1]}-*")
    )
    if not found:
        pytest.skip("no wheel in dist/ for this Python: run make wheel")
    return found[0]


def test_library_links_to_torch_and_the_c_runtime_alone() -> None:
    assert needed_libraries(LIBRARY) <= {"libtorch.so", "libtorch_cpu.so"} | C_RUNTIME
    assert needed_libraries(HOST) <= C_RUNTIME
    assert not has_run_path(LIBRARY)
    assert not has_run_path(HOST)


def test_torch_symbols_are_in_torch_2_11() -> None:
    """Every torch symbol the library binds to is in the list taken from libtorch_cpu 2.11 (all C:
    no C++ of torch is bound to). The stream getter lives in libtorch_cuda and is weak, so that the
    library loads without it."""
    lines = (REPOSITORY / "tests/torch_2_11_symbols.txt").read_text().splitlines()
    in_2_11 = {line for line in lines if not line.startswith("#")}
    bound = {
        name: weak
        for name, weak in undefined_symbols(LIBRARY).items()
        if re.search("torch|c10", name) and "ikbo" not in name
    }
    assert "torch_call_dispatcher" in bound
    assert {name for name in bound if name not in in_2_11} == {STREAM_GETTER}
    assert [name for name, weak in bound.items() if weak] == [STREAM_GETTER]


def test_nothing_of_ikbo_or_cuda_is_left_undefined() -> None:
    """-z defs doesn't object to weak references: an op declared and not written would be null."""
    names = undefined_symbols(LIBRARY)
    assert not [n for n in names if "ikbo" in n or n.startswith(("cuda", "cu", "__cuda", "nv"))]


def test_library_exports_plain_c_functions_alone() -> None:
    exported = exported_symbols(LIBRARY)
    assert "ikbo_version" in exported
    assert all(re.fullmatch(r"ikbo_[a-z_]+", name) for name in exported)


def test_no_path_of_the_build_machine_inside(tmp_path: pathlib.Path) -> None:
    torch_dir = str(pathlib.Path(torch.__file__).parent)
    roots = {str(REPOSITORY), torch_dir, "site-packages", "dist-packages", "/usr/local/cuda"}
    # The kernels' images lie compressed in the library.
    subprocess.run(
        [cuobjdump(), "-xelf", "all", LIBRARY], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL
    )
    images = list(tmp_path.glob("*.cubin"))
    for path in (LIBRARY, HOST, *images):
        content = path.read_bytes()
        assert not [root for root in roots if root.encode() in content], path
    # Line information for Nsight Compute is there all the same.
    [image] = [path for path in images if path.name.startswith("group_candidates")]
    assert b"/proc/self/cwd/csrc/kernels/group_candidates" in image.read_bytes()


def test_wheel_holds_what_is_installed_and_nothing_else() -> None:
    with zipfile.ZipFile(_wheel()) as wheel:
        assert wheel.read("ikbo/libikbo.so") == LIBRARY.read_bytes(), (
            "the ikbo under test isn't the wheel in dist/: run make test"
        )
        suffixes = {pathlib.PurePath(n).suffix for n in wheel.namelist() if n.startswith("ikbo/")}
        folders = {name.split("/")[0] for name in wheel.namelist()}
    assert suffixes - {""} <= {".py", ".pyi", ".so", ".typed"}
    assert len(folders) == 2, f"auditwheel bundled something: {folders}"


def test_wheel_runs_on_glibc_of_2021() -> None:
    """2.34: RHEL 9, Debian 12, Ubuntu 22.04 and later. Built there; an older base needs an older
    build machine."""
    report = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", _wheel()],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = re.search(r'"manylinux_2_(\d+)_x86_64"', report)
    assert found, report
    assert int(found[1]) <= 34, report


def test_metadata_names_torch_and_python() -> None:
    with zipfile.ZipFile(_wheel()) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = wheel.read(name).decode()
    assert "Requires-Dist: torch>=2.11" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert "License-Expression: Apache-2.0" in metadata


LOADS = """
import torch, ikbo
order, offsets = ikbo.group_candidates(torch.tensor([1, 0, 1], device="{device}"), 2)
assert order.tolist() == [1, 0, 2] and offsets.tolist() == [0, 1, 3]
print(ikbo.counters())
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_loads_under_a_cpu_only_torch() -> None:
    done = run_python(LOADS.format(device="cpu"))
    assert done.stdout.strip() == "{('group_candidates', 'cpu'): 1}", done.stderr


@pytest.mark.gpu
def test_loads_under_a_cuda_torch() -> None:
    """Runs on a side stream: the weak stream getter found its definition."""
    on_a_stream = "import torch\nwith torch.cuda.stream(torch.cuda.Stream()):" + LOADS.replace(
        "\n", "\n    "
    )
    done = run_python(on_a_stream.format(device="cuda"))
    assert done.stdout.strip() == "{('group_candidates', 'sm90'): 1}", done.stderr


def test_a_cpp_program_calls_an_op(tmp_path: pathlib.Path) -> None:
    """Torch loaded, the library dlopen'ed, an op called through the stable dispatcher."""
    torch_dir = pathlib.Path(torch.__file__).parent
    program = tmp_path / "dlopen_op"
    subprocess.run(
        ["c++", "-std=c++20", str(REPOSITORY / "tests/cpp/dlopen_op.cpp"), "-o", str(program),
         f"-isystem{torch_dir}/include", "-DTORCH_TARGET_VERSION=0x020b000000000000",
         "-Wl,--no-as-needed,--allow-shlib-undefined", f"-Wl,-rpath,{torch_dir}/lib",
         f"{torch_dir}/lib/libtorch.so", f"{torch_dir}/lib/libtorch_cpu.so", "-ldl"],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program, LIBRARY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"ikbo {__import__('ikbo').__version__}"
    assert done.stdout.splitlines()[1:] == ["11 22 13"]
