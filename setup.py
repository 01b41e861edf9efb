"""Builds the wheel: CMake and Ninja make libikbo.so and ikbo._host, setuptools packs them.

Environment:
    MAX_JOBS: parallel compilations; by default one a core.
    IKBO_LIBRARY: path of a libikbo.so built before. It is packed as it is and only _host is
        compiled (seconds; no nvcc, no torch): how wheels for further Python versions are made.
"""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import time

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

BUDGET = "a clean build on 2 cores may take 600 s"


def check_tools() -> None:
    """Names what is missing and how to get it, before CMake does so at length."""
    missing = [
        name for name in ("cmake", "ninja", "pybind11") if not importlib.util.find_spec(name)
    ]
    if missing:
        sys.exit(
            f"ikbo: the build needs {', '.join(missing)} for {sys.executable}. To fix: "
            "pip install -r requirements/build.txt"
        )
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    if not any(shutil.which(compiler.split()[0]) for compiler in compilers):
        sys.exit(
            f"ikbo: no C++ compiler found (looked for {', '.join(compilers)}). To fix: install one "
            "(Debian and Ubuntu: apt-get install g++), or set CXX."
        )


class CMakeBuild(build_ext):
    """Runs CMake; the one extension, _host, stands for all that it builds."""

    def build_extension(self, ext: Extension) -> None:
        check_tools()
        import ninja

        source = pathlib.Path(__file__).parent.resolve()
        build = pathlib.Path(self.build_temp).resolve()
        output = pathlib.Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        library = os.environ.get("IKBO_LIBRARY", "")
        configure = [
            f"-DCMAKE_MAKE_PROGRAM={pathlib.Path(ninja.BIN_DIR, 'ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DIKBO_OUTPUT_DIR={output}",
            f"-DIKBO_LIBRARY={pathlib.Path(library).resolve() if library else ''}",
        ]
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        started = time.monotonic()
        cmake("-S", source, "-B", build, "-G", "Ninja", *configure)
        cmake("--build", build, "--parallel", jobs)
        seconds = time.monotonic() - started
        print(f"ikbo: built in {seconds:.0f} s with {jobs} jobs; {BUDGET}")


def cmake(*arguments: object) -> None:
    command = [sys.executable, "-m", "cmake", *map(str, arguments)]
    if subprocess.run(command).returncode:
        sys.exit("ikbo: the build failed, see above.")


setup(
    ext_modules=[Extension("ikbo._host", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
