"""What the tests know of the library under test: the ikbo that Python imports, which in `make test`
is the installed wheel."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys

import ikbo

PACKAGE = pathlib.Path(ikbo.__file__).parent
LIBRARY = PACKAGE / "libikbo.so"
REPOSITORY = pathlib.Path(__file__).parent.parent


def needed_libraries(path: pathlib.Path) -> set[str]:
    """The DT_NEEDED entries."""
    return {tag.needed for tag in _dynamic_tags(path) if tag.entry.d_tag == "DT_NEEDED"}


def has_run_path(path: pathlib.Path) -> bool:
    """Whether an RPATH or RUNPATH sends the loader to folders of its own."""
    return any(tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH") for tag in _dynamic_tags(path))


def undefined_symbols(path: pathlib.Path) -> dict[str, bool]:
    """The symbols other libraries must bring; the value says whether the reference is weak."""
    return {
        symbol.name: symbol.entry.st_info.bind == "STB_WEAK"
        for symbol in _symbols(path)
        if symbol.name and symbol.entry.st_shndx == "SHN_UNDEF"
    }


def exported_symbols(path: pathlib.Path) -> set[str]:
    """The symbols other libraries can bind to."""
    return {s.name for s in _symbols(path) if s.name and s.entry.st_shndx != "SHN_UNDEF"}


def cuobjdump() -> pathlib.Path:
    """The tool that shows what kernels are in a library, beside nvcc."""
    found = importlib.util.find_spec("nvidia")
    assert found and found.submodule_search_locations
    return next(
        path
        for root in found.submodule_search_locations
        if (path := pathlib.Path(root, "cu13/bin/cuobjdump")).exists()
    )


def run_python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh Python, far from the repository."""
    options.setdefault("cwd", PACKAGE.parent)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options
    )  # type: ignore[call-overload,no-any-return]


def _dynamic_tags(path: pathlib.Path) -> list:
    return _section(path, ".dynamic", "iter_tags")


def _symbols(path: pathlib.Path) -> list:
    return _section(path, ".dynsym", "iter_symbols")


def _section(path: pathlib.Path, name: str, entries: str) -> list:
    # Imported here: machines that only run the GPU tests don't have it.
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        return list(getattr(ELFFile(file).get_section_by_name(name), entries)())
